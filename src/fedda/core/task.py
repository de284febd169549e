"""A learning task: a model, a loss, metrics, and the local work of a client in a round."""

from collections.abc import Callable
from functools import partial
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax, random

from fedda.core import tree
from fedda.core.algorithm import Seen
from fedda.core.shuffle import shuffled_rows
from fedda.core.tree import PyTree
from fedda.data.federation import Shard, num_rows, take_rows
from fedda.models import Model

# (outputs, y) -> one number for each example. A metric may also return two such arrays, a numerator
# and a denominator. Its value is then the ratio of their sums, as for a recall.
ExampleWise = Callable[[Any, Any], Any]


class Plan(NamedTuple):
    """A client's work in one round: `amount` mini-batch steps or epochs, or one full-batch step.

    Attributes:
        batch: The number of examples of a mini-batch.
        amount: The number of steps or epochs.
        unit: What `amount` counts. Under `full`, a client takes one step with all its examples.
    """

    batch: int
    amount: int = 1
    unit: Literal["steps", "epochs", "full"] = "steps"

    def full(self) -> "Plan":
        """Return the same plan with one full-batch step in each round."""
        return Plan(batch=self.batch, unit="full")


class Batch(NamedTuple):
    """The examples of one local step, as row numbers of a client's data.

    A large batch has several parts, which are processed one after the other. The random key is part
    of the batch, so two gradients on the same batch use the same dropout noise.
    """

    shard: Shard
    rows: Array  # [parts, batch]
    mask: Array  # [parts, batch]: False for padding
    key: Array

    @property
    def examples(self) -> Array:
        """The number of examples without padding, as a floating-point number."""
        return self.mask.sum(dtype=jnp.result_type(float))


class Batches(NamedTuple):
    """The batches of one client in a round. They are drawn one at a time, when they are read."""

    steps: int | Array
    at: Callable[[Array], Batch]  # the batch of a local step, by the number of the step


class Task(NamedTuple):
    """A model, a loss, and how a client trains. Equal tasks share one compiled program.

    Attributes:
        model: The model.
        loss: `(outputs, y) -> losses`, one number for each example.
        plan: The local work of a client in a round.
        metrics: The metrics of an evaluation, besides the loss.
        reduction: Whether a step takes the mean or the sum of the losses of its mini-batch.
        train_metrics: The metrics of the local steps, besides the loss.
    """

    model: Model
    loss: ExampleWise
    plan: Plan
    metrics: tuple[ExampleWise, ...] = ()
    reduction: Literal["mean", "sum"] = "mean"
    train_metrics: tuple[ExampleWise, ...] = ()

    def whole(self, shard: Shard, key: Array) -> Batch:
        """Return all examples of a client as one batch, in parts of at most the mini-batch size.

        Its random key differs from the keys of `batches`, even for the same `key`.
        """
        size = min(self.plan.batch, shard.max_count)
        rows = jnp.arange(-(-shard.max_count // size) * size, dtype=shard.count.dtype)
        mask = rows < shard.count
        rows = jnp.where(mask, rows, 0)  # masked slots read the client's own first example
        noise_key = random.fold_in(key, 2)  # `batches` splits 0 and 1 off the same key
        rows, mask = rows.reshape(-1, size), mask.reshape(-1, size)
        return Batch(shard, rows=rows, mask=mask, key=noise_key)

    def batches(self, shard: Shard, key: Array) -> Batches:
        """Draw the mini-batches of a client for one round.

        Every epoch is shuffled. The epochs are joined to one stream, which is cut into batches, so
        a batch may contain examples of two epochs. With `unit="epochs"` the last batch may be
        short; with `unit="steps"` it never is. The batches do not depend on other clients, so
        a deployed client draws the same batches as a simulated one. Only their padding depends on
        `shard.max_count`: if no client can have more than one batch, it is as wide as needed.
        """
        order_key, noise_key = random.split(key)
        size, amount, unit = self.plan
        if unit == "full":
            whole = self.whole(shard, noise_key)
            return Batches(1, lambda step: whole._replace(key=random.fold_in(noise_key, step)))
        used: int | Array = size * amount
        room = used
        if unit == "epochs":
            used, room = amount * shard.count, amount * shard.max_count
        one_epoch, width = unit == "epochs" and amount == 1, min(size, room)
        count = jnp.maximum(shard.count, 1)
        places = jnp.arange(width, dtype=count.dtype)

        def drawn(step: Array) -> tuple[Array, Array]:
            slots = width * jnp.asarray(step, count.dtype) + places
            epoch, position = (0, slots) if one_epoch else (slots // count, slots % count)
            mask = slots < used
            rows = shuffled_rows(order_key, count, epoch, position)
            # Masked slots read the client's own first example. Without the barrier, XLA may compute
            # a row again for each number of an example.
            return lax.optimization_barrier(jnp.where(mask, rows, 0)), mask

        # A CPU draws a batch when it is read. A GPU draws all at once, because a step takes it as
        # long as the start of some kernels.
        at_once = jax.default_backend() != "cpu"
        table = jax.vmap(drawn)(jnp.arange(-(-room // width))) if at_once else None

        def at(step: Array) -> Batch:
            rows, mask = drawn(step) if table is None else tree.take(table, step)
            return Batch(shard, rows[None], mask[None], key=random.fold_in(noise_key, step))

        same = shard.even or room <= size  # number of steps for all clients
        return Batches(-(-(room if same else used) // size), at)

    def gradient(self, params: PyTree, batch: Batch) -> tuple[PyTree, Seen]:
        """Return the gradient of a local step on this batch, and the step's statistics.

        The model is in training mode. Under the reduction `mean`, the gradient is the mean over the
        batch's examples. Under `sum`, it is this mean times min(N, batch), where N is the number of
        examples in the batch and `batch` the size of a mini-batch. A step with all examples of
        a client is therefore as long as one of its mini-batch steps, and for N <= batch it equals
        the step of an epoch. The gradient includes the model's penalty; the reported loss does not.
        """
        times = 1 if self.reduction == "mean" else jnp.minimum(batch.examples, self.plan.batch)
        return self._gradient(params, batch, times)

    def full_gradient(self, params: PyTree, shard: Shard, key: Array) -> PyTree:
        """Return the gradient of all examples of a client, in the same units for all clients.

        Under the reduction `mean`, it is the mean over the examples. Under `sum`, it is the mean
        times the mini-batch size, whatever the number of examples. A mean over clients, weighted by
        their numbers of examples, is then the gradient of the federation's loss, times the
        mini-batch size. To correct a step on a smaller batch, multiply it by `batch_share`.
        """
        times = 1 if self.reduction == "mean" else self.plan.batch
        gradient, _ = self._gradient(params, self.whole(shard, key), times)
        return gradient

    def batch_share(self, batch: Batch) -> Array:
        """Return the scale of `gradient` on this batch, relative to a complete mini-batch.

        It is 1 under the reduction `mean`, and min(N, batch) / batch under `sum`.
        """
        if self.reduction == "mean":
            return jnp.ones(())
        return jnp.minimum(batch.examples, self.plan.batch) / self.plan.batch

    def _gradient(self, params: PyTree, batch: Batch, times: Array | int) -> tuple[PyTree, Seen]:
        transform = partial(jax.value_and_grad, has_aux=True)
        (loss, metrics), gradient = self._sum_over_parts(transform, params, batch)
        gradient = tree.scale(times / jnp.maximum(batch.examples, 1), gradient)
        gradient = tree.as_types_of(params, gradient)
        if self.model.penalty is not None:
            gradient = tree.add(gradient, jax.grad(self.model.penalty)(params))
        return gradient, Seen(loss, batch.examples, metrics)

    def mean_loss(self, params: PyTree, batch: Batch) -> Array:
        """Return the mean loss of a batch in training mode, without the model's penalty."""
        loss, _ = self._sum_over_parts(lambda function: function, params, batch)
        return loss / jnp.maximum(batch.examples, 1)

    def _sum_over_parts(self, transform: Callable[[Any], Any], params: PyTree, batch: Batch) -> Any:
        """Return `transform(sums)(params, ...)`, added up over the parts of a batch.

        `sums` returns the loss and the metrics of one part, summed over its examples.
        """

        def sums(params: PyTree, rows: Array, mask: Array, key: Array) -> tuple[Array, Any]:
            x, y = batch.shard.rows(rows)
            model = self.model
            outputs = model.apply(params, x) if model.train is None else model.train(params, x, key)
            loss = _sum(self.loss(outputs, y), mask)
            return loss, tuple(_sums(metric, outputs, y, mask) for metric in self.train_metrics)

        def part(number: Array | int) -> Any:
            key = random.fold_in(batch.key, number)
            return tree.widen(transform(sums)(params, batch.rows[number], batch.mask[number], key))

        total = part(0)
        parts, size = batch.rows.shape
        if parts > 1:
            # The last parts of a small client are padding only: they are skipped to save time.
            needed = parts if batch.shard.even else -(-batch.shard.count // size)
            total = lax.fori_loop(1, needed, lambda i, total: tree.add(total, part(i)), total)
        return total

    @property
    def measures(self) -> dict[str, ExampleWise]:
        """The loss and the evaluation metrics, by name."""
        return {"loss": self.loss} | {metric.__name__: metric for metric in self.metrics}

    def evaluate(self, params: PyTree, x: Any, y: Any, batch: int = 512) -> dict[str, Array]:
        """Return the mean loss and the metrics over all examples, in evaluation mode."""
        sums = self.sums(params, x, y, num_rows(y), batch)
        return {name: above / below for name, (above, below) in sums.items()}

    def sums(
        self, params: PyTree, x: Any, y: Any, examples: Array | int, batch: int = 512
    ) -> dict[str, tuple[Array, Array]]:
        """Return numerator and denominator of each measure over the first `examples` rows.

        `evaluate` divides them. To evaluate a test set in parts, add the sums of the parts first.
        """
        batch = min(batch, num_rows(y))

        def part(first: Array) -> dict[str, tuple[Array, Array]]:
            rows = first + jnp.arange(batch)
            inputs, labels = take_rows((x, y), rows % num_rows(y))
            outputs, counts = self.model.apply(params, inputs), rows < examples
            return {name: _sums(f, outputs, labels, counts) for name, f in self.measures.items()}

        return tree.sum_leading(lax.map(part, jnp.arange(0, num_rows(y), batch)))


def _sum(values: Array, counts: Array) -> Array:
    return jnp.sum(jnp.where(counts, values, 0), dtype=jnp.result_type(float))


def _sums(measure: ExampleWise, outputs: Any, y: Any, counts: Array) -> tuple[Array, Array]:
    """Return numerator and denominator of a measure's mean, without padding."""
    values = measure(outputs, y)
    above, below = values if isinstance(values, tuple) else (values, jnp.ones(counts.shape))
    return _sum(above, counts), _sum(below, counts)
