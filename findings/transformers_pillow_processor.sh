#!/usr/bin/env bash
# transformers 5.17.0: the image processor of Idefics3 that is based on Pillow asks for torchvision.
#
# Guess:    Idefics3ImageProcessorPil, which computes with Pillow and NumPy, needs no torchvision.
# Behavior: imported from transformers.models.idefics3 it is a stand-in that asks for torch and torchvision; the same name
#           from its own module works, and makes pixels without either. Qwen2VLImageProcessorPil works from both.
# Output:   "Idefics3ImageProcessorPil requires the Torchvision library but it was not found in your environment."
# Why:      who takes this processor does so to be without torchvision, and would install it after all.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q --no-compile transformers==5.17.0 numpy==2.4.6 pillow==13.0.0
cd "$folder"
"$folder/venv/bin/python" - 2>"$folder/errors" <<'PY' || { tail -20 "$folder/errors"; exit 1; }
import importlib

from PIL import Image

image = Image.new("RGB", (64, 64), "white")
for family, name in (("idefics3", "Idefics3ImageProcessorPil"), ("qwen2_vl", "Qwen2VLImageProcessorPil")):
    whole = importlib.import_module(f"transformers.models.{family}")
    own = importlib.import_module(f"transformers.models.{family}.image_processing_pil_{family}")
    images = [[image]] if family == "idefics3" else [image]
    pixels = getattr(own, name)()(images, return_tensors="np")["pixel_values"]
    try:
        getattr(whole, name)()
        refusal = ""
    except ImportError as error:
        refusal = " ".join(str(error).split())
    print(f"{name}: from its module, pixels {pixels.shape}; from the family, {refusal[:80]!r}")
    assert ("requires the Torchvision library" in refusal) == (family == "idefics3"), refusal
PY
