"""The error of eight-bit formats on pretrained models: by part, layer and depth, and of gradients.

    python -m benchmarks.eight_bits NAME=MODEL_DIR --out FILE.json --figure FILE.svg
    python -m benchmarks.eight_bits --read FILE.json --figure FILE.svg

transformers computes in FP32, and jetrl's quantizer rounds the operands of the decoder's linear
layers, the keys and the values. As in jetrl, Q, K and V are one matrix, gate and up another. An
operand such as `int8 h64 1xK` has the format, the rotation (multiplied by Hadamard matrices of 64
along the sum, rounded, and multiplied back), and the rows and columns that share a scale; K is the
whole sum. An operand that is not named stays in FP32.

    forward      KL divergence per token, difference of the log-prob of the text's token, share of
                 tokens whose most likely next token differs
    parts        the same for one part of a plan's forward, in some layers or in all
    gradients    relative error and cosine of the weight gradients of cross-entropy: whole, by kind
                 of layer, and by layer from the first

A figure shows the parts by depth. Texts are rows of a question and an answer, in the model's chat
template, or of a prompt and a completion, which are joined.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import matplotlib as mpl
import torch
from benchmarks.harness import Row, begins, command_typed, print_table, write_results
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator
from torch import Tensor
from torch.nn import functional
from transformers import AttentionInterface, AutoModelForCausalLM, AutoTokenizer
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from jetrl.precision.quantize import CodeFormat, dequantize, quantize, rotate
from jetrl.runs.plots import COLORS, STYLE

LENGTH = 512  # tokens of a sequence
SEQUENCES = 8  # of a forward, and of all gradients
LINEARS = {
    "qkv": ("self_attn", ("q_proj", "k_proj", "v_proj")),
    "o": ("self_attn", ("o_proj",)),
    "gate_up": ("mlp", ("gate_proj", "up_proj")),
    "down": ("mlp", ("down_proj",)),
}
PARTS = {
    **{"qkv": "blue", "o": "violet", "gate_up": "amber", "down": "green"},
    **{"keys": "pink", "values": "teal", "all": "slate"},
}


@dataclass(frozen=True)
class Flow:
    """The rounding of each operand of a decoder layer; "": FP32.

    DGrad's weight is rounded as `wd` says, then its transpose as `wt` says.

    Attributes:
        w, x: FProp's weight [N, K] and activations [T, K].
        dy, wd, wt: DGrad's output gradient [T, N], and the weight as [N, K] and as [K, N].
        dyt, xt: WGrad's output gradient [N, T] and activations [K, T].
        k, v: Keys and values [T, D] of each head.
    """

    w: str = ""
    x: str = ""
    dy: str = ""
    wd: str = ""
    wt: str = ""
    dyt: str = ""
    xt: str = ""
    k: str = ""
    v: str = ""

    def __str__(self) -> str:
        return ", ".join(f"{name} {how}" for name, how in vars(self).items() if how)

    def only(self, names: str) -> Flow:
        """Return the flow with these operands rounded, and the others in FP32."""
        return Flow(**{name: getattr(self, name) for name in names.split()})


def rounded(x: Tensor, how: str) -> Tensor:
    """Quantize and dequantize x [..., M, K]."""
    if how in ("", "bf16"):
        return x.bfloat16().float() if how else x
    name, *turned, group = how.split()
    rows, columns = (x.shape[-1] if n == "K" else int(n) for n in group.split("x"))
    format: CodeFormat = "int8" if name == "int8" else "e5m2" if name == "e5m2" else "e4m3"
    codes = quantize(rotate(x) if turned else x, (rows, columns), format)
    return rotate(dequantize(codes)) if turned else dequantize(codes)


class RoundedLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, flow: Flow) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.flow = flow
        y = rounded(x.flatten(0, -2), flow.x) @ rounded(weight, flow.w).T
        return y.view(*x.shape[:-1], -1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor, None]:
        x, weight = ctx.saved_tensors
        dy, flow = grads[0].flatten(0, -2), ctx.flow
        dx = None
        if ctx.needs_input_grad[0]:
            turned = rounded(rounded(weight, flow.wd).T, flow.wt)
            dx = (rounded(dy, flow.dy) @ turned.T).view(x.shape)
        dw = rounded(dy.T, flow.dyt) @ rounded(x.flatten(0, -2).T, flow.xt).T
        return dx, dw, None


class Model:
    """A pretrained model in FP32 whose decoder rounds as `round` says; its weights by layer."""

    def __init__(self, path: str, device: torch.device) -> None:
        AttentionInterface.register("rounded", self._attention)
        load: Any = AutoModelForCausalLM.from_pretrained
        module = load(path, dtype=torch.float32, attn_implementation="rounded")
        self.module = module.to(device).requires_grad_(False)
        self.weights: dict[tuple[str, int], Tensor] = {}
        for layer, block in enumerate(self.module.model.layers):
            for kind, (parent, names) in LINEARS.items():
                owner = getattr(block, parent)
                self._fuse(kind, layer, [getattr(owner, name) for name in names])
        self.num_layers = len(self.module.model.layers)

    def round(self, flow: Flow, part: str = "all", layers: Sequence[int] | None = None) -> None:
        """Set the rounding of what follows: of one part or all, in these layers or all."""
        self.flow, self.part = flow, part
        self.layers = range(self.num_layers) if layers is None else layers

    def _flow(self, part: str, layer: int) -> Flow:
        return self.flow if self.part in (part, "all") and layer in self.layers else Flow()

    def _fuse(self, kind: str, layer: int, linears: Sequence[torch.nn.Linear]) -> None:
        """Make linear layers of one input one rounded product: the first one computes it."""
        assert all(linear.bias is None for linear in linears), "biases are not supported"
        weight = torch.cat([linear.weight for linear in linears]).requires_grad_()
        sizes = [linear.out_features for linear in linears]
        outputs: list[Tensor] = []

        def forward(x: Tensor, place: int) -> Tensor:
            if place == 0:
                y = RoundedLinear.apply(x, weight, self._flow(kind, layer))
                outputs[:] = y.split(sizes, -1)
            return outputs[place]

        for place, linear in enumerate(linears):
            setattr(linear, "forward", functools.partial(forward, place=place))  # noqa: B010
        self.weights[kind, layer] = weight

    def _attention(
        self, module: Any, q: Tensor, k: Tensor, v: Tensor, *rest: Any, **more: Any
    ) -> Any:
        """Attend with keys (after their rotation) and values [B, H, T, D] rounded."""
        layer = module.layer_idx
        k = k + (rounded(k, self._flow("keys", layer).k) - k).detach()
        v = v + (rounded(v, self._flow("values", layer).v) - v).detach()
        return sdpa_attention_forward(module, q, k, v, *rest, **more)

    @torch.no_grad()
    def logprobs(self, ids: Tensor) -> Tensor:
        return self.module(ids, use_cache=False).logits.log_softmax(-1)

    def gradients(self, ids: Tensor) -> dict[tuple[str, int], Tensor]:
        """Return the gradient of each weight, float32."""
        logits = self.module(ids, use_cache=False).logits[:, :-1].flatten(0, 1)
        loss = functional.cross_entropy(logits, ids[:, 1:].flatten())
        made = torch.autograd.grad(loss, list(self.weights.values()))
        return dict(zip(self.weights, made, strict=True))


def sequences(path: str, text: Path, tokens: int, device: torch.device) -> Tensor:
    """Return token ids [sequences, LENGTH] of texts, one after the other."""
    tokenizer = AutoTokenizer.from_pretrained(path)
    ids: list[int] = []
    for line in text.read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        if "question" in row:
            roles = (("user", row["question"]), ("assistant", row["answer"]))
            turns = [{"role": role, "content": content} for role, content in roles]
            ids += tokenizer(tokenizer.apply_chat_template(turns, tokenize=False))["input_ids"]
        else:
            ids += tokenizer(row["prompt"] + row["completion"])["input_ids"]
            ids.append(tokenizer.eos_token_id)
        if len(ids) >= tokens:
            break
    return torch.tensor(ids[: len(ids) // LENGTH * LENGTH], device=device).view(-1, LENGTH)


class Forwards:
    """The errors of a model's forward against FP32."""

    def __init__(self, model: Model, ids: Tensor) -> None:
        self.model, self.batches = model, ids.split(SEQUENCES)
        model.round(Flow())
        self.exact = [model.logprobs(batch) for batch in self.batches]

    def row(self, flow: Flow, part: str = "all", layers: Sequence[int] | None = None) -> Row:
        self.model.round(flow, part, layers)
        sums = torch.zeros(3, dtype=torch.float64, device=self.batches[0].device)
        for batch, truth in zip(self.batches, self.exact, strict=True):
            found = self.model.logprobs(batch)
            greedy = (truth.argmax(-1) != found.argmax(-1)).sum()
            difference = torch.sub(truth, found, out=found)
            drawn = difference[:, :-1].gather(2, batch[:, 1:, None])
            kl = (truth.exp() * difference).sum(dtype=torch.float64)
            sums += torch.stack([kl, drawn.abs().sum().double(), greedy.double()])
        kl, error, greedy = (sums / sum(map(torch.numel, self.batches))).tolist()
        numbers = {"kl": kl, "logprob_error": error, "greedy": greedy}
        return {name: float(f"{number:.4g}") for name, number in numbers.items()}


def similarity(parts: Iterable[Sequence[float]]) -> tuple[float, float]:
    """Return the relative error and the cosine, of sums of squares (error, truth) and products."""
    errors, truths, products = map(sum, zip(*parts, strict=True))
    founds = errors - truths + 2 * products  # |f - t|^2 = |f|^2 + |t|^2 - 2 f t
    cosine = products / (truths * founds) ** 0.5
    return round((errors / truths) ** 0.5, 5), round(cosine, 6)


def gradient_rows(model: Model, ids: Tensor, flows: dict[str, Flow]) -> Iterator[Row]:
    model.round(Flow())
    exact = model.gradients(ids)
    layers = range(model.num_layers)
    for name, flow in flows.items():
        model.round(flow)
        sums = {}
        for key, found in model.gradients(ids).items():
            found, truth = found.double(), exact[key].double()
            wrong, true = ((found - truth) ** 2).sum(), (truth**2).sum()
            sums[key] = torch.stack([wrong, true, (found * truth).sum()])
        terms = dict(zip(sums, torch.stack(list(sums.values())).tolist(), strict=True))
        whole = similarity(terms.values())
        kinds = {kind: similarity(terms[kind, layer] for layer in layers) for kind in LINEARS}
        depths = [similarity(terms[kind, layer] for kind in LINEARS) for layer in layers]
        row: Row = {"table": "gradients", "flow": name}
        for place, title in enumerate(("error", "cosine")):
            row[title] = whole[place]
            row[f"{title}_by_kind"] = {kind: values[place] for kind, values in kinds.items()}
            row[f"{title}_by_layer"] = [values[place] for values in depths]
        yield row


FP8, SQUARE, INT8, KV = "e4m3 1x128", "e4m3 128x128", "int8 h64 1xK", "int8 1xK"
BF16 = Flow(*["bf16"] * 9)
UNIFIED = Flow(SQUARE, FP8, FP8, SQUARE, "", FP8, SQUARE, KV, "e4m3 1xK")
PLANS = {"unified": UNIFIED, "int8": Flow(INT8, INT8, FP8, INT8, SQUARE, FP8, SQUARE, KV, KV)}
VARIANTS = {
    "int8, grad_output=int8": Flow(*[INT8] * 7, *[KV] * 2),
    "unified, grad_output=e5m2": replace(UNIFIED, dy="e5m2 1x128", dyt="e5m2 1x128"),
    # One copy of a weight's codes, rotated along K, for FProp and DGrad.
    "int8 in squares": Flow(
        *("int8 h64 128x128", "int8 h64 1x128", "int8 1x128", "int8 h64 128x128", ""),
        *("int8 h64 1x128", "int8 h64 128x128", KV, KV),
    ),
}
PRODUCTS = {"linears": "w x dy wd wt dyt xt", "fprop": "w x", "backward": "dy wd wt dyt xt"}
PRODUCTS |= {"dgrad": "dy wd wt", "wgrad": "dyt xt"}


def forward_flows() -> dict[str, Flow]:
    """Return the flows of the table `forward`: plans, keys, values, then all formats and groups."""
    flows = {"bf16": BF16, **PLANS}
    flows |= {f"{name}, linears": plan.only("w x") for name, plan in PLANS.items()}
    kv = [Flow(**{name: f"{how} 1xK"}) for name in "kv" for how in ("e4m3", "int8")]
    pairs = [(f"1x{g}", f"1x{g}") for g in (128, 64, 32, "K")]
    pairs += [(f"{g}x{g}", f"1x{g}") for g in (128, 64, 32)]
    for how in ("e4m3", "e4m3 h64", "e5m2", "e5m2 h64", "int8", "int8 h64"):
        for weight, x in pairs:
            both = Flow(f"{how} {weight}", f"{how} {x}")
            kv += [both, both.only("w"), both.only("x")]
    return flows | {str(flow): flow for flow in kv}  # activations appear once


def gradient_flows() -> dict[str, Flow]:
    """Return the flows of the table `gradients`: plans and their products, then operands."""
    flows = {"bf16": BF16, **PLANS, **VARIANTS}
    for name, plan in {**PLANS, **VARIANTS}.items():
        flows |= {f"{name}: {product}": plan.only(own) for product, own in PRODUCTS.items()}
    formats = ("e4m3", "e5m2", "int8", "int8 h64")
    pairs = [f"{how} {group}" for how in formats for group in ("1x128", "1xK")]
    alone = [Flow(dy=how) for how in pairs]
    # DGrad's weight: in squares that FProp reads too, from FProp's codes, from the master weight.
    alone += [Flow(wd=how) for how in (SQUARE, "int8 128x128", "int8 h64 128x128")]
    alone += [Flow(wd=INT8, wt=INT8), Flow(wd=INT8, wt=SQUARE), Flow(wd=INT8)]
    alone += [Flow(wt=how) for how in (INT8, FP8, "int8 h64 1x128")]
    alone += [Flow(dyt=how, xt=how) for how in pairs]
    alone += [Flow(dyt=FP8), Flow(xt=SQUARE), Flow(dyt=INT8), Flow(xt=INT8)]
    alone += [Flow(dyt="e5m2 1x128", xt=SQUARE)]
    return flows | {str(flow): flow for flow in alone}


def fifths(num_layers: int) -> list[range]:
    ends = [round(i * num_layers / 5) for i in range(6)]
    return [range(a, b) for a, b in itertools.pairwise(ends) if a < b]


def model_rows(model: Model, ids: Tensor) -> Iterator[Row]:
    """Yield the rows of all tables."""
    forwards = Forwards(model, ids)
    for name, flow in forward_flows().items():
        yield {"table": "forward", "flow": name, **forwards.row(flow)}
    begins("parts")
    parts, every = fifths(model.num_layers), range(model.num_layers)
    for name, plan in PLANS.items():
        cases = [(part, layers) for part in PARTS for layers in (every, *parts)]
        cases += [("all", range(layer, layer + 1)) for layer in every]
        for part, layers in dict.fromkeys(cases):  # a fifth may be one layer
            where: Row = {"part": part, "first": layers[0], "last": layers[-1]}
            errors = forwards.row(plan, part, layers)
            yield {"table": "parts", "flow": name, **where, **errors}
    begins("gradients")
    del forwards
    yield from gradient_rows(model, ids[:SEQUENCES], gradient_flows())


def draw(rows: Sequence[Row], out: Path) -> None:
    """Draw the KL of each part alone by depth, with a plot for each model and plan."""
    models = list(dict.fromkeys(row["model"] for row in rows))
    with mpl.rc_context({**STYLE, "svg.hashsalt": "jetrl eight_bits"}):
        figure = Figure(figsize=(8.6, 0.6 + 2.5 * len(models)))
        figure.set_layout_engine("constrained", wspace=0.08)
        grid = figure.subplots(len(models), len(PLANS), squeeze=False, sharey="row")
        for across, model in zip(grid, models, strict=True):
            for axes, plan in zip(across, PLANS, strict=True):
                own = [r for r in rows if (r["model"], r["flow"]) == (model, plan) and "part" in r]
                kl = {(row["part"], row["first"], row["last"]): row["kl"] for row in own}
                spans = fifths(1 + max(row["last"] for row in own))
                for part, color in PARTS.items():
                    values = [kl[part, span[0], span[-1]] for span in spans]
                    label = {"all": "all of them", "gate_up": "gate and up"}.get(part, part)
                    style = "--" if part == "all" else "-"
                    axes.plot(values, style, color=COLORS[color], label=label, marker="o", ms=3.5)
                axes.set_xticks(range(len(spans)), [f"{span[0]} to {span[-1]}" for span in spans])
                axes.set_title(f"{model}, {plan}", loc="left", fontsize=10)
                axes.set(yscale="log", xlabel="layers that round")
                axes.yaxis.set_major_locator(LogLocator(subs=(1, 3)))
                axes.yaxis.set_major_formatter("{x:.0e}")
            across[0].set_ylabel("KL per token to FP32")
        handles, labels = grid[0, 0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside upper left", ncols=len(labels))
        out.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(out, format="svg", facecolor="white", metadata={"Date": None})


def measured(args: argparse.Namespace, argv: Sequence[str] | None) -> list[Row]:
    """Return the rows of all models, and write them after each model."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.backends.cuda.matmul.allow_tf32 = False
    rows, tokens = list[Row](), dict[str, int]()
    command = command_typed("python -m benchmarks.eight_bits", argv)
    for number, word in enumerate(args.models):
        name, _, path = word.rpartition("=")
        name = name or Path(path).name
        command = command.replace(word, name)
        begins(name)
        ids = sequences(path, args.text[min(number, len(args.text) - 1)], args.tokens, device)
        tokens[name] = ids.numel()
        for row in model_rows(Model(path, device), ids):
            rows.append({"model": name, **row})
        write_results(args.out, "eight_bits", command, rows, tokens=tokens)
    begins("end")
    return rows


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.eight_bits", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    add = parser.add_argument
    texts = "JSONL: one file for each model; the last one is also for models after it"
    add("models", nargs="*", metavar="[NAME=]DIR", help="Hugging Face directories")
    add("--text", type=Path, nargs="+", default=[Path("data/gsm8k/test.jsonl")], help=texts)
    add("--tokens", type=int, default=20480)
    add("--out", default="build/bench/eight_bits.json")
    add("--read", type=Path, help="draw the rows of this file")
    add("--figure", type=Path, help="SVG file")
    args = parser.parse_args(argv)
    rows = json.loads(args.read.read_text())["rows"] if args.read else measured(args, argv)
    for table in ("forward", "parts", "gradients"):
        shown = [row for row in rows if row["table"] == table]
        print_table([{k: v for k, v in r.items() if "_by_" not in k} for r in shown])
    if args.figure:
        draw(rows, args.figure)


if __name__ == "__main__":
    main()
