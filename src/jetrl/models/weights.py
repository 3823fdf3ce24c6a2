"""The weights of a model: FP32 master weights, and the quantized weights rounded from them.

The optimizer updates master weights. `requantize` rounds them into the quantized weights, which
GEMMs, norms and the embedding read on both sides. Quantized weights never change their addresses,
because captured CUDA graphs read them. Biases and a scalar head have only master weights.

A layer requests its weights by name when it is built. Quantized weights are registered under the
layer's name, for `requantize`. A master weight that no layer requested is an error, so a new kind
of weight cannot be forgotten.

The weights of a frozen base are read from files one at a time, rounded, and freed: an FP8 plan
stores about one byte per parameter instead of the four of a master weight, and no gradients or
optimizer states. NVFP4 codes in files are used unchanged. A frozen model runs only forwards of the
training side; the base of an adapter serves both sides.

With several processes, a rank owns some rows of each matrix: its master weight, gradient and
optimizer states have only these rows, in whole blocks of 128 (`distributed.shards`). Quantized
weights are whole on every rank.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol

import torch
from torch import Tensor, nn

from jetrl.distributed.collectives import whole_tensor
from jetrl.distributed.shards import Shard, shard_of
from jetrl.distributed.world import world
from jetrl.errors import UserError
from jetrl.models.adapter import Adapter, adapter_names
from jetrl.models.families import buffer_names
from jetrl.models.planes_head import PlanesHead
from jetrl.models.source import ModelSource
from jetrl.precision.adapter_weight import AdapterWeight
from jetrl.precision.backend import arithmetic_of, has_kernels
from jetrl.precision.formats import BF16, Format, number_format
from jetrl.precision.gradients import Gradients, OrderedGradients
from jetrl.precision.linear import Linear
from jetrl.precision.plan import PrecisionPlan, Side
from jetrl.precision.quantized_weight import QuantizedWeight


class Rounded(Protocol):
    """The weights of a layer that forwards read, rounded from master weights."""

    def requantize(self) -> None:
        """Round the master weights again, into the tensors that are there."""
        ...

    def tensors(self) -> list[Tensor]:
        """Return every tensor that forwards read."""
        ...


class Weights:
    """The master weights and quantized weights of one model.

    An adapter (`models.adapter`) adds small master weights, whole on every rank.

    Args:
        trains: Returns whether the parameter of a name is trained, and so has a master weight.
            None: all are, or the adapter's choice, or none if `frozen`.

    Attributes:
        tensors: Every parameter by name, any floating dtype, until all layers are built.
        masters: The FP32 parameters that the optimizer updates, by name; this rank's rows if
            divided. Buffers are among them, without gradients: checkpoints and exports have both.
        shards: The divisions of divided matrices, by name.
        of_tower: The names of master weights of the image tower, which no layer reads.
        dtype: The dtype of activations: bfloat16, or float32 under the fp32 plan.
        rest: The format of embeddings and norms on each side.
        linear_formats: The format of the linears on each side, per decoder layer.
    """

    def __init__(
        self,
        source: ModelSource,
        plan: PrecisionPlan,
        device: torch.device,
        frozen: bool = False,
        trains: Callable[[str], bool] | None = None,
    ) -> None:
        # A GPU draws other random weights than a CPU.
        drawn_on = torch.device("cpu") if plan.defined and device.type == "cuda" else device
        ranks, adapter, tensors = world(), source.adapter, source.weights(drawn_on)
        if adapter is not None:
            tensors, trains = adapter.over(tensors), trains or adapter.lora.trains
        assert not (frozen and trains), "a frozen model trains nothing"
        self.plan, self.device, self.frozen = plan, device, frozen
        self.tensors, self._adapter = tensors, adapter
        names = () if frozen else tensors.names
        trained = [name for name in names if trains is None or trains(name)]
        if trained and ranks.size > 1 and plan.reads_masters:
            raise UserError(
                "precision.preset=fp32 needs whole master weights, which are divided among several "
                "processes: use one process, or another preset"
            )
        buffers = buffer_names(source.config)
        self.masters: dict[str, nn.Parameter] = {}
        self.shards: dict[str, Shard] = {}
        for name in trained:  # one at a time: files may be larger than memory
            self._add_master(name, tensors[name], trainable=name not in buffers)
        of_tower = {} if frozen else source.trained_of_tower(device)
        self.of_tower = tuple(of_tower)
        for name in of_tower:
            self._add_master(name, of_tower[name].clone(), trainable=True)
        self.gradients = Gradients()
        if ranks.size > 1 and device.type != "meta" and not frozen:
            self.gradients = OrderedGradients(ranks, self.masters, self.shards)
        self.gradients.of_images = [self.masters[name] for name in of_tower]
        self.sides: tuple[Side, ...] = ("train",) if frozen else ("rollout", "train")
        rest, num_layers = number_format(plan.rest), len(source.config.layers)
        self.dtype = rest.dtype
        self.rest: dict[Side, Format] = {"rollout": rest, "train": rest}
        self.linear_formats = [plan.linear_formats(n, num_layers) for n in range(num_layers)]
        # Products of codes are BF16. A GPU widens operands that its FP8 GEMM does not support.
        widened = plan.widens_wgrad and has_kernels(device)
        self._coded_wgrad = plan.gradient.coded and not widened
        self._asked_for: set[str] = set()
        self._quantized: dict[str, Rounded] = {}

    def _add_master(self, name: str, tensor: Tensor, trainable: bool) -> None:
        """Add a master weight; of a matrix that is divided, this rank's rows."""
        ranks = world()
        if ranks.size > 1 and self.device.type != "meta" and tensor.dim() == 2:
            shard = shard_of(len(tensor), ranks.rank, ranks.size)
            if shard is not None:
                self.shards[name] = shard
                tensor = tensor[shard.own_rows].clone()
        self.masters[name] = nn.Parameter(tensor.to(self.device, torch.float32), trainable)

    def whole(self, name: str) -> Tensor:
        """Return a whole master weight, float32; a divided one is gathered from all ranks.

        Every rank must call this method, with the same names in the same order.
        """
        master, shard = self.masters[name].detach(), self.shards.get(name)
        return master if shard is None else whole_tensor(master, shard)

    def master(self, name: str) -> nn.Parameter:
        """Return a float32 weight that a layer reads without rounding it, trained or not."""
        self._asked_for.add(name)
        if name in self.masters:
            return self.masters[name]
        return nn.Parameter(self.tensors[name].to(self.device, torch.float32), requires_grad=False)

    def quantized(self, layer: str, name: str, formats: Mapping[Side, Format]) -> QuantizedWeight:
        """Return the quantized weight of a layer, which `requantize` rounds again."""
        assert layer not in self._quantized, f"two layers are called {layer}"
        codes = None
        if self.tensors.codes is not None and any(f.frozen for f in formats.values()):
            codes = self.tensors.codes(name)
            if codes is None:  # a matrix that the files store in 16 bits
                formats = {"rollout": BF16, "train": BF16}
        if codes is None:
            master = self.master(name)
        else:  # Codes are used unchanged, so the master weight has a shape but no values.
            self._asked_for.add(name)
            empty = torch.empty((), device=self.device).expand(codes.shape)
            master = nn.Parameter(empty, requires_grad=False)
        # Norms always keep their master weights: forwards with gradients read those.
        fixed = name not in self.masters and master.dim() > 1
        weight = QuantizedWeight(
            name=layer,
            master=master,
            formats=formats,
            roundings={side: self.plan.rounding(side, formats[side]) for side in self.sides},
            shard=self.shards.get(name),
            fixed=fixed,
            codes=codes,
        )
        self._quantized[layer] = weight
        return weight

    def linear(self, name: str, formats: Mapping[Side, Format], bias: bool = False) -> Linear:
        """Return the linear layer with the parameters `name`.weight and, if asked, `name`.bias."""
        weight = self.quantized(name, f"{name}.weight", formats)
        bias_master = self.master(f"{name}.bias") if bias else None
        in_bf16 = formats["train"].coded and self._coded_wgrad
        if not weight.fixed:
            dtype = torch.bfloat16 if in_bf16 else torch.float32
            self.gradients.expected.append((weight.master, dtype))
            if formats["train"].estimates:
                self.gradients.estimated[weight.master] = formats["train"].estimate
        own, added = self._adapter, None
        if own is not None and name in own.shapes:
            if formats["train"].emulated:
                raise UserError(
                    f"layer {name}: precision.preset = {self.plan.name} is not for adapters: use "
                    "precision.preset = unified or jet, and precision.base=nvfp4 to keep a frozen "
                    "base in NVFP4"
                )
            added = self._adapter_weight(name, own)
        return Linear(
            quantized=weight,
            bias=bias_master,
            plan=self.plan,
            out_dtype=self.dtype,
            gradients=self.gradients,
            adapter=added,
        )

    def _adapter_weight(self, layer: str, adapter: Adapter) -> AdapterWeight:
        """Return the adapter of a linear layer, registered for `requantize`."""
        for name in adapter_names(layer):
            tensor = adapter.tensors[name].to(self.device, torch.float32, copy=True)
            self.masters[name] = nn.Parameter(tensor)
        a, b = (self.masters[name] for name in adapter_names(layer))
        shape = adapter.shapes[layer]
        # In the GPU's kernel all 64 rows of a tile of y belong to one part.
        whole_tiles = all(first % 64 == 0 for first, _ in shape.parts)
        assert whole_tiles or arithmetic_of(a) is None, f"{layer}: parts begin at {shape.parts}"
        weight = AdapterWeight(layer, a, b, shape, self.dtype)
        self._quantized[f"{layer}.lora"] = weight
        return weight

    def embedding(self) -> QuantizedWeight:
        """Return the embedding [V, D] in the dtype of activations."""
        weight = self.quantized("embed", "embed.weight", self.rest)
        if not weight.fixed:
            self.gradients.expected.append((weight.master, None))
        return weight

    def head(self, embedding: QuantizedWeight, tied: bool) -> Linear:
        """Return the output head, with float32 logits."""
        formats = {side: number_format(self.plan.on(side).lm_head) for side in self.rest}
        weight = embedding
        if not tied or formats != embedding.formats:
            name = "embed.weight" if tied else "lm_head.weight"
            weight = self.quantized("lm_head", name, formats)
        if not weight.fixed:
            self.gradients.in_chunks.append(weight.master)
            self.gradients.expected.append((weight.master, torch.float32))
        kind = PlanesHead if any(f.two_planes for f in formats.values()) else Linear
        head = kind(weight, None, self.plan, torch.float32, self.gradients)
        head.name = "lm_head"
        return head

    def follow(self, layer: str, rounded: Rounded) -> None:
        """Round the weights of a layer with the others."""
        self._quantized[layer] = rounded
        rounded.requantize()

    def check_complete(self) -> None:
        """Check, after all layers are built, that each weight belongs to a layer."""
        unread = sorted(set(self.tensors.names) - self._asked_for)
        assert not unread, f"no layer reads or quantizes these weights: {', '.join(unread)}"
        adapted = () if self._adapter is None else self._adapter.shapes
        lost = [layer for layer in adapted if f"{layer}.lora" not in self._quantized]
        assert not lost, f"no layer has these adapters: {lost}"
        self._adapter = None  # its tensors were copied
        del self.tensors

    @torch.no_grad()
    def requantize(self) -> None:
        """Round every master weight into its quantized weight, in place; skip fixed weights."""
        assert not self.frozen, "a frozen model has no master weights to round"
        for layer, weight in self._quantized.items():
            before = [tensor.data_ptr() for tensor in weight.tensors()]
            if not (isinstance(weight, QuantizedWeight) and weight.fixed):
                weight.requantize()
            # Captured CUDA graphs read the weight at this address.
            after = [tensor.data_ptr() for tensor in weight.tensors()]
            assert before == after, f"the quantized weight of {layer} has moved"

    def quantized_tensors(self) -> dict[str, Tensor]:
        """Return all tensors of the quantized weights, keyed `<layer>.<index>`."""
        return {
            f"{layer}.{number}": tensor
            for layer, weight in self._quantized.items()
            for number, tensor in enumerate(weight.tensors())
        }

    def scales(self) -> dict[str, Tensor]:
        """Return the float32 scales of each weight in codes by its layer's name."""
        return {
            layer: scales
            for layer, weight in self._quantized.items()
            if isinstance(weight, QuantizedWeight)
            for scales in weight.fp8_scales()
        }

    def move(self, moved: Callable[[Tensor], Tensor]) -> None:
        """Replace each tensor of the quantized weights by `moved(tensor)`."""
        assert self.frozen, "trained weights cannot be moved"
        for weight in self._quantized.values():
            assert isinstance(weight, QuantizedWeight), "a frozen model has no adapter"
            weight.move(moved)
