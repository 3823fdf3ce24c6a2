"""The weights of a model: FP32 master weights, and quantized weights made from those.

The optimizer changes master weights. `requantize` rounds them into the quantized weights that every
GEMM and norm of both sides, and the embedding, read. These keep their addresses as long as the
model lives: captured CUDA graphs read them. Biases and a scalar head are read from their master
weights directly.

A layer asks by name, when it is made, for all that it reads. Rounded weights are registered under
the layer's name, for `requantize`, and a master weight that no layer asked for is an error: no
weight of a new kind can be left out.

Weights that are not trained, a frozen base, are read from their files one at a time, rounded for
the sides that read them, and dropped: an FP8 plan keeps about a byte per parameter instead of a
master's four, and no gradient or moment. NVFP4 codes of files are kept unchanged. A frozen model
serves only the training side's forwards; the base of an adapter serves both sides.

In a run of several processes a rank owns some rows of each matrix: master weight, gradient and
moments have only these rows, in whole blocks of 128 (`distributed.shards`). Quantized weights are
whole on every rank.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, nn

from jetrl.distributed.collectives import whole_tensor
from jetrl.distributed.shards import Shard, shard_of
from jetrl.distributed.world import world
from jetrl.errors import UserError
from jetrl.models.adapter import Adapter, adapter_names
from jetrl.models.coded_weights import CodedWeights
from jetrl.models.layer import RMSNorm
from jetrl.precision.adapter_weight import AdapterWeight
from jetrl.precision.backend import arithmetic_of
from jetrl.precision.formats import BF16, Format, number_format
from jetrl.precision.gradients import Expected, Gradients, OrderedGradients
from jetrl.precision.linear import Linear
from jetrl.precision.plan import PrecisionPlan, Side
from jetrl.precision.quantized_weight import QuantizedWeight


class Weights:
    """The master weights and quantized weights of one model.

    An adapter (`models.adapter`) adds small master weights, whole on every rank, like norms.

    Args:
        tensors: Every parameter by name, as in `families.parameter_shapes`; any floating dtype.
        trains: Returns by name whether a parameter is trained and has a master weight; None: all,
            or none if `frozen`.

    Attributes:
        masters: The FP32 parameters that the optimizer changes, by name; of a divided matrix, this
            rank's rows.
    """

    def __init__(
        self,
        tensors: CodedWeights,
        plan: PrecisionPlan,
        device: torch.device,
        frozen: bool = False,
        trains: Callable[[str], bool] | None = None,
        adapter: Adapter | None = None,
    ) -> None:
        assert not (frozen and trains), "a frozen model trains nothing"
        self.plan, self.device, self.frozen = plan, device, frozen
        self.sides: tuple[Side, ...] = ("train",) if frozen else ("rollout", "train")
        self._tensors = tensors
        self.masters: dict[str, nn.Parameter] = {}
        self.shards: dict[str, Shard] = {}
        if not frozen:
            self._keep_masters([name for name in tensors if trains is None or trains(name)])
        self.gradients = Gradients()
        if world().size > 1 and not frozen and device.type != "meta":
            self.gradients = OrderedGradients(world(), self.masters, self.shards)
        self._expected: list[Expected] = []  # products of backward, in the order of forward
        self._in_chunks: list[Tensor] = []
        # A product of codes arrives in BF16; a GPU widens operands that its FP8 GEMM does not take.
        widened = device.type == "cuda" and plan.widens_wgrad
        self._coded_wgrad = plan.gradient.coded and not widened
        self._asked_for: set[str] = set()
        self._adapter = adapter
        self._quantized: dict[str, QuantizedWeight | AdapterWeight] = {}

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of activations: bfloat16, or float32 under the fp32 plan."""
        return number_format(self.plan.rest).dtype

    def _keep_masters(self, names: Sequence[str]) -> None:
        """Put master weights on the device one by one; of a divided matrix, this rank's rows."""
        if names and world().size > 1 and self.plan.reads_masters:
            raise UserError(
                "precision.preset=fp32 needs whole master weights, which are divided among several "
                "processes: use one process, or another preset"
            )
        for name in names:
            tensor = self._tensors[name]
            divided = world().size > 1 and tensor.dim() > 1 and self.device.type != "meta"
            shard = shard_of(len(tensor), world().rank, world().size) if divided else None
            if shard is not None:
                self.shards[name] = shard
                tensor = tensor[shard.own_rows].clone()
            self.masters[name] = nn.Parameter(tensor.to(self.device, torch.float32))

    def whole(self, name: str) -> Tensor:
        """Return a whole master weight, float32; of a divided one a copy, gathered from all ranks.

        Every rank calls this method, for the same names in the same order.
        """
        master, shard = self.masters[name].detach(), self.shards.get(name)
        return master if shard is None else whole_tensor(master, shard)

    def master(self, name: str) -> nn.Parameter:
        """Return a master weight for a layer that reads its values; an untrained one is read."""
        self._asked_for.add(name)
        if name in self.masters:
            return self.masters[name]
        return nn.Parameter(self._tensors[name].to(self.device, torch.float32), requires_grad=False)

    def quantized(self, layer: str, name: str, formats: Mapping[Side, Format]) -> QuantizedWeight:
        """Return a master weight as a layer reads it, rounded again by each `requantize`."""
        assert layer not in self._quantized, f"two layers are called {layer}"
        frozen = any(format.frozen for format in formats.values())
        read = self._tensors.codes if frozen else None
        codes = None if read is None else read(name)
        if read is not None and codes is None:  # which the files leave in 16 bits
            formats = {"rollout": BF16, "train": BF16}
        if codes is None:
            master = self.master(name)
        else:  # which are not rounded: of the master weight there is only the shape
            self._asked_for.add(name)
            empty = torch.empty((), device=self.device).expand(codes.shape)
            master = nn.Parameter(empty, requires_grad=False)
        # A norm's master weight stays in any case: forwards with gradients read it as it is.
        fixed = name not in self.masters and master.dim() > 1
        shard = self.shards.get(name)
        weight = QuantizedWeight(
            name=layer,
            master=master,
            formats=formats,
            roundings=self.plan.roundings(formats),
            shard=shard,
            sides=self.sides,
            fixed=fixed,
            codes=codes,
        )
        self._quantized[layer] = weight
        return weight

    def linear(self, name: str, formats: Mapping[Side, Format], bias: bool = False) -> Linear:
        """Return the linear layer of the parameters `name`.weight and, with a bias, `name`.bias."""
        weight = self.quantized(name, f"{name}.weight", formats)
        bias_master = self.master(f"{name}.bias") if bias else None
        in_bf16 = formats["train"].coded and self._coded_wgrad
        if not weight.fixed:
            self._expected.append((weight.master, torch.bfloat16 if in_bf16 else torch.float32))
        beside = self._beside(name)
        return Linear(weight, bias_master, self.plan, self.dtype, self.gradients, beside)

    def _beside(self, layer: str) -> AdapterWeight | None:
        """Return the adapter of a linear layer, registered like its quantized weight."""
        if self._adapter is None or layer not in self._adapter.shapes:
            return None
        for name in adapter_names(layer):
            tensor = self._adapter.tensors[name].to(self.device, torch.float32, copy=True)
            self.masters[name] = nn.Parameter(tensor)
        a, b = (self.masters[name] for name in adapter_names(layer))
        shape = self._adapter.shapes[layer]
        # The GPU's kernel has 64 rows of y to a tile, which all belong to one part.
        whole_tiles = all(first % 64 == 0 for first, _ in shape.parts)
        assert whole_tiles or arithmetic_of(a) is None, f"{layer}: parts begin at {shape.parts}"
        weight = AdapterWeight(layer, a, b, shape, self.dtype)
        self._quantized[f"{layer}.lora"] = weight
        return weight

    def _on_both_sides(self, layer: str, name: str) -> QuantizedWeight:
        """Return a weight in the activations' dtype."""
        rest = number_format(self.plan.rest)
        return self.quantized(layer, name, {"rollout": rest, "train": rest})

    def embedding(self) -> QuantizedWeight:
        """Return the embedding [V, D] in the activations' dtype."""
        weight = self._on_both_sides("embed", "embed.weight")
        if not weight.fixed:
            self._expected.append((weight.master, None))
        return weight

    def head(self, embedding: QuantizedWeight, tied: bool) -> Linear:
        """Return the output head, whose logits are float32."""
        sides: tuple[Side, Side] = ("rollout", "train")
        formats = {side: number_format(self.plan.on(side).lm_head) for side in sides}
        weight = embedding
        if not tied or formats != embedding.formats:
            name = "embed.weight" if tied else "lm_head.weight"
            weight = self.quantized("lm_head", name, formats)
        if not weight.fixed:
            self._in_chunks.append(weight.master)
            self._expected.append((weight.master, torch.float32))
        head = Linear(weight, None, self.plan, torch.float32, self.gradients)
        head.name = "lm_head"
        return head

    def norm(self, name: str, eps: float) -> RMSNorm:
        """Return the RMSNorm of the parameter `name`.weight."""
        return RMSNorm(self._on_both_sides(name, f"{name}.weight"), eps)

    def check_complete(self) -> None:
        """Check that some layer reads each master weight, once all layers are made.

        The gradients learn which products to expect.
        """
        unread = sorted(set(self._tensors) - self._asked_for)
        assert not unread, f"no layer reads these weights, nor quantizes them: {', '.join(unread)}"
        adapted = () if self._adapter is None else self._adapter.shapes
        lost = [layer for layer in adapted if f"{layer}.lora" not in self._quantized]
        assert not lost, f"no layer has these adapters: {lost}"
        self.gradients.expect(self._expected, self._in_chunks)
        self._adapter = None  # its tensors were copied
        del self._tensors

    @torch.no_grad()
    def requantize(self) -> None:
        """Round every master weight into its quantized weight, in place; a fixed weight stays."""
        assert not self.frozen, "a frozen model has no master weights to round"
        for layer, weight in self._quantized.items():
            before = [tensor.data_ptr() for tensor in weight.tensors()]
            if not weight.fixed:
                weight.requantize()
            # Captured CUDA graphs read the weight where it was.
            after = [tensor.data_ptr() for tensor in weight.tensors()]
            assert before == after, f"the quantized weight of {layer} has moved"

    def quantized_tensors(self) -> dict[str, Tensor]:
        """Return all tensors of the quantized weights, by layer name and number."""
        return {
            f"{layer}.{number}": tensor
            for layer, weight in self._quantized.items()
            for number, tensor in enumerate(weight.tensors())
        }

    def scales(self) -> dict[str, Tensor]:
        """Return the float32 scales of each FP8 weight by its layer's name."""
        weights = self._quantized.items()
        return {layer: scales for layer, weight in weights for scales in weight.fp8_scales()}

    def move(self, moved: Callable[[Tensor], Tensor]) -> None:
        """Replace each tensor of the quantized weights by `moved(tensor)`."""
        assert self.frozen, "weights that are trained stay where they are"
        for weight in self._quantized.values():
            assert isinstance(weight, QuantizedWeight), "a frozen model has no adapter"
            weight.move(moved)
