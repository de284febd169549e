"""A PyTorch client: its local work, and what it refuses."""

import numpy as np
import pytest
import torch
from flwr.app import Message, RecordDict
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import fedda.torch
from fedda.errors import InputError
from fedda.flower import messages
from fedda.torch import ALGORITHMS, DecoupledSGD, begin_round, client_app, end_round
from helpers.torch_problem import CLIENTS, HYPER, F, Side, context, counting, loader, network, twin

pytestmark = pytest.mark.usefixtures("x64")


def ask(app, content, number=0, kind="train"):
    message = Message(content, number, kind)
    return app(message, context(number)).content


def steps_of(reply):
    """The number of steps that a client took; its upload says that with the option bias=steps."""
    upload = reply["upload"]
    return float(upload["sum/steps/value"].numpy() / upload["weight"].numpy())


@pytest.mark.parametrize(
    ("work", "unit", "full", "steps", "visited"),
    [
        (2, "steps", False, 2, 8),
        (6, "steps", False, 6, 4 + 4 + 4 + 1 + 4 + 4),  # of 13 examples
        (2, "epochs", False, 8, 26),
        (2, "epochs", True, 1, 13),
    ],
)
def test_local_work(work, unit, full, steps, visited):
    app = client_app(network(), F.mse_loss, lambda _: loader(CLIENTS[0]), work, unit)
    reply = ask(app, counting().content(full=full))
    assert steps_of(reply) == steps
    assert reply["seen"]["examples"] == visited
    assert reply["upload"]["weight"].numpy() == 13
    about = dict(ask(app, RecordDict(), kind="query")["fedda"])
    assert about == {"partition": 0, "algorithms": list(ALGORITHMS)}


def test_a_loss_may_give_one_number_for_each_example():
    def each(outputs, y):
        return (outputs - y).square().mean(1)

    uploads = [
        ask(client_app(network(), loss, lambda _: loader(CLIENTS[0])), counting().content())
        for loss in (F.mse_loss, each)
    ]
    for name, array in uploads[0]["upload"].items():
        np.testing.assert_allclose(array.numpy(), uploads[1]["upload"][name].numpy(), atol=1e-12)


@pytest.mark.parametrize(("dropout", "shuffle"), [(0.5, False), (0.0, True)])
def test_random_numbers_belong_to_the_round_and_the_client(dropout, shuffle):
    noisy = torch.nn.Sequential(network(), torch.nn.Dropout(dropout)).eval()  # it is put to train
    side = Side("fedda-sgdm", HYPER["fedda-sgdm"], fedda.torch.model(noisy))
    app = client_app(noisy, F.mse_loss, lambda _: loader(CLIENTS[0], shuffle=shuffle))

    def upload(number, client):
        sent = ask(app, side.content(number), client)["upload"]
        return np.concatenate([array.numpy().ravel() for array in sent.values()])

    before = torch.random.get_rng_state()
    first = upload(0, 0)
    assert torch.equal(torch.random.get_rng_state(), before)
    torch.manual_seed(5)
    np.testing.assert_array_equal(upload(0, 0), first)
    others = [upload(1, 0), upload(0, 1)]
    assert all(np.abs(first - other).max() > 1e-3 for other in others)
    assert np.abs(others[0] - others[1]).max() > 1e-3


def test_training_that_changes_a_buffer_is_refused():
    module = network()
    torch.nn.utils.parametrizations.spectral_norm(module[0])
    side = Side("fedda-sgdm", HYPER["fedda-sgdm"], fedda.torch.model(module))
    app = client_app(module, F.mse_loss, lambda _: loader(CLIENTS[0]))
    with pytest.raises(InputError, match=r"changes the buffer '0\.parametrizations.* GroupNorm"):
        ask(app, side.content())


def test_an_algorithm_of_which_pytorch_clients_know_nothing():
    side = Side("scaffold", {}, twin())
    app = client_app(network(), F.mse_loss, lambda _: loader(CLIENTS[0]))
    with pytest.raises(InputError, match=r"'scaffold', but PyTorch clients .* JAX clients"):
        ask(app, side.content())


def test_numbers_of_the_server_are_checked():
    side = counting()
    side.hyper = side.hyper._replace(client_lr=-1.0)
    app = client_app(network(), F.mse_loss, lambda _: loader(CLIENTS[0]))
    with pytest.raises(InputError, match="client_lr of fedda-adam must be a positive number"):
        ask(app, side.content())


def test_a_message_for_another_module_is_refused():
    module = torch.nn.Sequential(torch.nn.Linear(3, 2, dtype=torch.float64))
    with pytest.raises(messages.MessageError, match=r"the array .* is not expected\. Server"):
        begin_round(counting().content(), module, DecoupledSGD(module.parameters()))


def test_a_rate_that_changes_within_a_round_is_refused():
    module = network()
    optimizer = DecoupledSGD(module.parameters())
    order = begin_round(counting().content(), module, optimizer)
    assert optimizer.param_groups[0]["lr"] == 0.3
    optimizer.param_groups[0]["lr"] = 0.15
    with pytest.raises(InputError, match=r"lr of DecoupledSGD must stay 0\.3 .* got 0\.15"):
        end_round(order, context(), module, optimizer, 1, 0.0, 0)


def test_a_client_without_examples_is_refused():
    module = network()
    optimizer = DecoupledSGD(module.parameters())
    order = begin_round(counting().content(), module, optimizer)
    with pytest.raises(InputError, match="at least one example, got examples=0"):
        end_round(order, context(), module, optimizer, 0, 0.0, 0)


def test_an_optimiser_with_a_part_of_the_parameters_is_refused():
    module = network()
    optimizer = DecoupledSGD(module[0].parameters())
    with pytest.raises(InputError, match=r"lacks 2, for example 2\.weight"):
        begin_round(counting().content(), module, optimizer)


class Stream(IterableDataset):
    def __iter__(self):
        return iter([torch.zeros(3)])


EXAMPLES = TensorDataset(torch.zeros(5, 3), torch.zeros(5, 2))


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (EXAMPLES, "must return a DataLoader, got TensorDataset"),
        (DataLoader(EXAMPLES, 2, drop_last=True), "no drop_last"),
        (DataLoader(EXAMPLES, None), "must have a batch_size"),
        (DataLoader(Stream(), 2), "a dataset with a length"),
        (DataLoader(TensorDataset(torch.zeros(0, 3), torch.zeros(0, 2)), 2), "at least one"),
    ],
    ids=["no loader", "drop_last", "no batches", "stream", "empty"],
)
def test_data_that_are_refused(data, words):
    app = client_app(network(), F.mse_loss, lambda _: data)
    with pytest.raises(InputError, match=words):
        ask(app, RecordDict(), kind="query")


def test_batches_that_are_refused():
    three = DataLoader(TensorDataset(*(torch.zeros(5, 2) for _ in range(3))), 2)
    named = DataLoader([{"x": torch.zeros(3), "y": torch.zeros(2)}], 1)
    for data, words in ((three, "a list of length 3"), (named, "a dict of length 2")):
        app = client_app(network(), F.mse_loss, lambda _, data=data: data)
        with pytest.raises(InputError, match=rf"pair \(x, y\) of tensors, got {words}"):
            ask(app, counting().content())


@pytest.mark.parametrize(
    ("work", "words"),
    [
        ({"local_work": 0}, "local_work must be a whole number of at least 1, got 0"),
        ({"local_work": True}, "local_work must be a whole number of at least 1, got True"),
        ({"local_unit": "epoch"}, "unknown value of local_unit 'epoch'. Did you mean epochs"),
    ],
    ids=str,
)
def test_local_work_that_is_refused(work, words):
    with pytest.raises(InputError, match=words):
        client_app(network(), F.mse_loss, lambda _: None, **work)
