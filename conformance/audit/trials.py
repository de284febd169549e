"""What is compared: implementations of other libraries, each with a vector.

A trial whose library differs from the vector names what it equals instead. So each difference has a
cause that reproduces the library's numbers.
"""

from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple

from conformance.audit import readings
from conformance.references import REFERENCES
from conformance.references.reference import Reference


class Library(NamedTuple):
    """A library, the name of its environment, and its adapter."""

    title: str
    environment: str
    adapter: str


LIBRARIES = {
    "flower": Library("Flower", "flower", "peer_flower"),
    "pfl": Library("pfl-research", "pfl", "peer_pfl"),
    "fedjax": Library("FedJAX", "fedjax-2024", "peer_fedjax"),
    "fluke": Library("fluke", "fluke", "peer_fluke"),
    "fedlab": Library("FedLab", "fedlab", "peer_fedlab"),
    "nvflare": Library("NVIDIA FLARE", "nvflare", "peer_nvflare"),
}


class Reading(NamedTuple):
    """What an implementation equals if it does not equal the vector.

    Attributes:
        verdict: `another reading` if the library, a paper or an option of the vectors describes it;
            `different` if it contradicts what the library says that it implements.
        name: A short name.
        reference: The algorithm in NumPy.
        options: The options of the reference.
    """

    verdict: Literal["another reading", "different"]
    name: str
    reference: Reference
    options: Mapping[str, Any] = {}


class Trial(NamedTuple):
    """One comparison.

    Attributes:
        library: A key of `LIBRARIES`.
        name: The name of the trial in the library's adapter.
        implementation: The class or function of the library.
        algorithm: The algorithm of the vector.
        case: The name of the vector.
        hyper: Hyper-parameters that are not those of the vector, because the library lacks them.
        reading: What it equals if not the vector.
        note: What a reader should know, and the place in the library's source that shows it.
    """

    library: str
    name: str
    implementation: str
    algorithm: str
    case: str = "default"
    hyper: Mapping[str, float] = {}
    reading: Reading | None = None
    note: str = ""


def another(name: str, reference: Reference, options: Mapping[str, Any] | None = None) -> Reading:
    return Reading("another reading", name, reference, options or {})


def wrong(name: str, reference: Reference, options: Mapping[str, Any] | None = None) -> Reading:
    return Reading("different", name, reference, options or {})


def keras(algorithm: str) -> Reading:
    return another("the vector `form=keras`", REFERENCES[algorithm], {"form": "keras"})


def uniform(algorithm: str) -> Reading:
    return another("plain mean of the clients", readings.uniform(REFERENCES[algorithm]))


RATE_1 = {"server_lr": 1.0}
KINGMA_BA = another("Adam with corrected bias", readings.KINGMA_BA)
UNIFORM = "weighting=uniform"  # the vector of SCAFFOLD in the paper
EXAMPLES: Callable[[Any], int] = lambda visit: visit.examples  # noqa: E731

FLOWER = "flwr.serverapp.strategy"
PFL = "pfl.algorithm"
FEDJAX = "fedjax.algorithms"
FLUKE = "fluke.algorithms"
FEDLAB = "fedlab.contrib.algorithm"
NVFLARE = "nvflare.app_common.workflows"
NVFLARE_PT = "nvflare.app_opt.pt"

TORCH_ADAM = (
    "The user chooses the server's optimiser, here `torch.optim.Adam`. It corrects the bias of m "
    "and v as Kingma and Ba (2015) do. Algorithm 2 of Reddi et al. (2021) has no correction."
)
MIME_SGDM = (
    "`optimizers.sgd` has the momentum of Optax, m <- beta m + d. The paper's is damped, "
    "m <- beta m + (1 - beta) d. With 1 - beta times the learning rate they are equal."
)
MIME_ADAM = (
    "The vector has `denominator=fresh`, which is the form of FedJAX. The paper keeps v fixed "
    "during the local steps, like m: `denominator=frozen`."
)
MIME_ADAGRAD = (
    "The documentation of `optimizers.adagrad` says that `eps` is inside the root: "
    "d / sqrt(v + eps). In the vector it is outside: d / (sqrt(v) + eps)."
)
TWICE = (
    "The server's rate is applied twice. `FedOptServer.__init__` stores it as `hyper_params.lr`, "
    "which is also the rate of the base class's `Server.aggregate`. `FedOptServer.aggregate` calls "
    "that first, so its `d_t` is `lr` times the mean move, and then multiplies with `lr` again. "
    "Algorithm 2 of Reddi et al. (2021): Delta_t is the mean move, and only the step has eta. In "
    "addition v starts at 0, where the paper asks for v >= tau². By hand: with AdaGrad, "
    "`lr=0.5`, `beta1=0` and a mean move of 1, v is 0.25 after the first round instead of 1."
)

TRIALS = [
    # ---- Flower
    Trial("flower", "FedAvg", f"{FLOWER}.FedAvg", "fedavg", hyper=RATE_1),
    Trial("flower", "FedAvgM", f"{FLOWER}.FedAvgM", "fedopt-sgdm"),
    Trial(
        "flower", "FedAdagrad", f"{FLOWER}.FedAdagrad", "fedopt-adagrad",
        reading=keras("fedopt-adagrad"),
        note="`FedAdagrad.aggregate_train` starts v at 0, as Keras does. Algorithm 2 of Reddi et "
        "al. (2021) asks for v >= tau² at the start.",
    ),
    Trial(
        "flower", "FedAdam", f"{FLOWER}.FedAdam", "fedopt-adam", reading=keras("fedopt-adam"),
        note="`FedAdam.aggregate_train` documents a rate with corrected bias. Its exponent is "
        "`server_round + 1`, which is 2 in the first round; in Kingma and Ba (2015) it is 1. This "
        "equals the vector `form=keras`. Algorithm 2 of Reddi et al. (2021) has no correction.",
    ),
    Trial(
        "flower", "FedYogi", f"{FLOWER}.FedYogi", "fedopt-yogi",
        reading=another("v starts at 0", readings.v_from_zero("yogi")),
        note="`FedYogi.aggregate_train` starts v at 0, as FedAdagrad does, and corrects no bias.",
    ),
    # ---- pfl-research
    Trial("pfl", "FedAvg", f"{PFL}.federated_averaging.FederatedAveraging", "fedavg"),
    Trial("pfl", "FedProx", f"{PFL}.fedprox.FedProx", "fedprox"),
    Trial(
        "pfl", "FedAvgM", f"{PFL}.federated_averaging.FederatedAveraging", "fedopt-sgdm",
        note="The user chooses the server's optimiser, here `torch.optim.SGD`.",
    ),
    Trial(
        "pfl", "FedAdagrad", f"{PFL}.federated_averaging.FederatedAveraging", "fedopt-adagrad",
        note="The user chooses the server's optimiser, here `torch.optim.Adagrad` with "
        "`initial_accumulator_value=tau²`.",
    ),
    Trial(
        "pfl", "FedAdam", f"{PFL}.federated_averaging.FederatedAveraging", "fedopt-adam",
        reading=KINGMA_BA, note=TORCH_ADAM,
    ),
    Trial(
        "pfl", "SCAFFOLD II", f"{PFL}.scaffold.SCAFFOLD", "scaffold", UNIFORM,
        reading=wrong("control variates with the other sign", readings.scaffold(sign=-1)),
        note="`SCAFFOLD.train_one_user` adds `model_diff / (K * lr)` to `local_c_plus`, and "
        "`get_model_difference` is y - x. Option II of algorithm 1 adds (x - y) / (K eta). The "
        "local step is that of the paper, g - c_i + c. So it adds the client's gradient minus the "
        "mean gradient, where the paper subtracts it. By hand: a client whose gradient is 4 stores "
        "c_i = -4.",
    ),
    Trial(
        "pfl", "SCAFFOLD I", f"{PFL}.scaffold.SCAFFOLD", "scaffold", "all options",
        reading=wrong(
            "control variates with the other sign", readings.scaffold(sign=-1), {"control": "I"}
        ),
        note="With `DiskUserStateStorage`. `local_c_plus` is the model's difference after a step "
        "with rate 1, which is -g_i(x). Option I of algorithm 1 is g_i(x). By hand: a client whose "
        "gradient is 4 stores c_i = -4.",
    ),
    Trial(
        "pfl", "SCAFFOLD I, in memory", f"{PFL}.scaffold.SCAFFOLD", "scaffold", "all options",
        reading=wrong(
            "the other sign, and c_i is replaced too early",
            readings.scaffold(sign=-1, early=True),
            {"control": "I"},
        ),
        note="With `InMemoryUserStateStorage`. As in the previous row. In addition, the "
        "`local_c_plus` that is stored shares its tensors with the model, whose "
        "`get_model_difference` writes into them again. A client that returns finds its new c_i "
        "in place of its old one, so its local steps use it, and its change of c is 0.",
    ),
    # ---- FedJAX
    Trial("fedjax", "FedAvg", f"{FEDJAX}.fed_avg.federated_averaging", "fedavg"),
    Trial("fedjax", "FedAvgM", f"{FEDJAX}.fed_avg.federated_averaging", "fedopt-sgdm"),
    Trial(
        "fedjax", "FedAdagrad", f"{FEDJAX}.fed_avg.federated_averaging", "fedopt-adagrad",
        reading=another("tau inside the root", readings.INSIDE_ADAGRAD),
        note="The user chooses the server's optimiser, here `optimizers.adagrad` with "
        "`initial_accumulator_value=tau²`. Its documentation says that `eps` is inside the root.",
    ),
    Trial(
        "fedjax", "FedAdam", f"{FEDJAX}.fed_avg.federated_averaging", "fedopt-adam",
        reading=KINGMA_BA,
        note="The user chooses the server's optimiser, here `optimizers.adam`. It corrects the "
        "bias of m and v as Kingma and Ba (2015) do. Algorithm 2 of Reddi et al. (2021) has no "
        "correction.",
    ),
    Trial(
        "fedjax", "FedYogi", f"{FEDJAX}.fed_avg.federated_averaging", "fedopt-yogi",
        reading=another("Yogi as in Optax", readings.OPTAX_YOGI),
        note="The user chooses the server's optimiser, here `optimizers.yogi`, which is that of "
        "Optax: m and v start at 1e-6, and their bias is corrected.",
    ),
    Trial(
        "fedjax", "Mime, SGDM", f"{FEDJAX}.mime.mime", "mime-sgdm",
        reading=another("undamped momentum", readings.undamped("mime")), note=MIME_SGDM,
    ),
    Trial("fedjax", "Mime, Adam", f"{FEDJAX}.mime.mime", "mime-adam", note=MIME_ADAM),
    Trial(
        "fedjax", "Mime, AdaGrad", f"{FEDJAX}.mime.mime", "mime-adagrad",
        reading=another("eps inside the root", readings.mime_inside("mime")), note=MIME_ADAGRAD,
    ),
    Trial(
        "fedjax", "MimeLite, SGDM", f"{FEDJAX}.mime_lite.mime_lite", "mimelite-sgdm",
        reading=another("undamped momentum", readings.undamped("mimelite")), note=MIME_SGDM,
    ),
    Trial(
        "fedjax", "MimeLite, Adam", f"{FEDJAX}.mime_lite.mime_lite", "mimelite-adam",
        note=MIME_ADAM,
    ),
    Trial(
        "fedjax", "MimeLite, AdaGrad", f"{FEDJAX}.mime_lite.mime_lite", "mimelite-adagrad",
        reading=another("eps inside the root", readings.mime_inside("mimelite")),
        note=MIME_ADAGRAD,
    ),
    # ---- fluke
    Trial("fluke", "FedAvg", f"{FLUKE}.fedavg.FedAVG", "fedavg"),
    Trial("fluke", "FedProx", f"{FLUKE}.fedprox.FedProx", "fedprox"),
    Trial(
        "fluke", "FedAvgM", f"{FLUKE}.fedavgm.FedAVGM", "fedopt-sgdm", hyper=RATE_1,
        reading=wrong("the first round is lost", readings.FIRST_ROUND_LOST),
        note="In the first round, `FedAVGMServer.aggregate` sets the momentum to 0 and puts the "
        "model back to what it was, so the work of the first cohort is not used. Hsu et al. "
        "(2019): v <- beta v + Delta w, w <- w - v in every round. By hand: the model is 1, "
        "that of the only client becomes 2, and the server's stays 1.",
    ),
    Trial(
        "fluke", "FedAdagrad", f"{FLUKE}.fedopt.FedOpt", "fedopt-adagrad", "server_momentum=step",
        reading=wrong(
            "the server's rate twice, v starts at 0",
            readings.rate_twice("adagrad"),
            {"server_momentum": "step"},
        ),
        note=TWICE,
    ),
    Trial(
        "fluke", "FedAdam", f"{FLUKE}.fedopt.FedOpt", "fedopt-adam",
        reading=wrong("the server's rate twice, v starts at 0", readings.rate_twice("adam")),
        note=TWICE,
    ),
    Trial(
        "fluke", "FedYogi", f"{FLUKE}.fedopt.FedOpt", "fedopt-yogi",
        reading=wrong("the server's rate twice, v starts at 0", readings.rate_twice("yogi")),
        note=TWICE,
    ),
    Trial(
        "fluke", "SCAFFOLD", f"{FLUKE}.scaffold.SCAFFOLD", "scaffold", UNIFORM,
        note="With `weighted=False`, and the server's rate given as `lr`.",
    ),
    Trial(
        "fluke", "SCAFFOLD, weighted", f"{FLUKE}.scaffold.SCAFFOLD", "scaffold", UNIFORM,
        reading=another(
            "moves weighted by examples, control variates not", readings.scaffold(weight=EXAMPLES)
        ),
        note="With `weighted=True`, the default. The control variates have no weights, as in the "
        "paper.",
    ),
    Trial(
        "fluke", "SCAFFOLD, global_step", f"{FLUKE}.scaffold.SCAFFOLD", "scaffold", UNIFORM,
        reading=wrong("the whole model is scaled", readings.scaffold(move="scaled")),
        note="With `weighted=False`, and the server's rate given as `global_step`. "
        "`_get_client_weights` multiplies the weights of the local models with it, so the model "
        "becomes eta times their mean. Algorithm 1: x <- x + eta Delta x. With `global_step=1`, "
        "the default, this is the same. By hand: with `global_step=0.5`, a model of 1 becomes 0.5 "
        "if no client moves.",
    ),
    # ---- FedLab
    Trial(
        "fedlab", "FedAvg", f"{FEDLAB}.fedavg.FedAvgServerHandler", "fedavg", hyper=RATE_1,
        reading=uniform("fedavg"),
        note="`SyncServerHandler.global_update` gives `Aggregators.fedavg_aggregate` no weights. "
        "In McMahan et al. (2017), which it cites, the weights are n_k / n.",
    ),
    Trial(
        "fedlab", "FedProx", f"{FEDLAB}.fedprox.FedProxServerHandler", "fedprox", hyper=RATE_1,
        reading=uniform("fedprox"),
        note="As for FedAvg. Algorithm 2 of Li et al. (2020) has a plain mean, too, of clients "
        "that are drawn with probabilities n_k / n.",
    ),
    Trial(
        "fedlab", "SCAFFOLD", f"{FEDLAB}.scaffold.ScaffoldServerHandler", "scaffold", UNIFORM
    ),
    # ---- NVIDIA FLARE
    Trial(
        "nvflare", "FedAvg", f"{NVFLARE}.fedavg.FedAvg", "fedavg", hyper=RATE_1,
        note="If clients report their numbers of examples as `NUM_STEPS_CURRENT_ROUND`.",
    ),
    Trial(
        "nvflare", "FedAvg, weighted by steps", f"{NVFLARE}.fedavg.FedAvg", "fedavg", hyper=RATE_1,
        reading=another(
            "weights are numbers of local steps", readings.by_steps(REFERENCES["fedavg"])
        ),
        note="If clients report what the name of `NUM_STEPS_CURRENT_ROUND` says.",
    ),
    Trial(
        "nvflare", "FedProx", f"{NVFLARE_PT}.fedproxloss.PTFedProxLoss", "fedprox", hyper=RATE_1
    ),
    Trial("nvflare", "FedAvgM", f"{NVFLARE_PT}.fedopt_ctl.FedOpt", "fedopt-sgdm"),
    Trial(
        "nvflare", "FedAdagrad", f"{NVFLARE_PT}.fedopt_ctl.FedOpt", "fedopt-adagrad",
        note="The user chooses the server's optimiser, here `torch.optim.Adagrad` with "
        "`initial_accumulator_value=tau²`.",
    ),
    Trial(
        "nvflare", "FedAdam", f"{NVFLARE_PT}.fedopt_ctl.FedOpt", "fedopt-adam",
        reading=KINGMA_BA, note=TORCH_ADAM,
    ),
    Trial(
        "nvflare", "SCAFFOLD", f"{NVFLARE}.scaffold.Scaffold", "scaffold", UNIFORM, RATE_1,
        reading=wrong("c moves by the mean of the cohort", readings.scaffold(per="cohort")),
        note="`scaffold_aggregate_fn` returns the mean change of the cohort's c_i, and the "
        "controller adds it to c. Algorithm 1: c <- c + |S| / N times this mean. If all clients "
        "take part in every round, |S| = N, and this is the same.",
    ),
]  # fmt: skip
