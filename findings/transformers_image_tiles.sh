#!/usr/bin/env bash
# transformers 5.23.0: the image processor of Idefics3 and SmolVLM makes 10 tiles where it says that it makes 7.
#
# Guess:    get_number_of_image_patches(height, width) counts the tiles that the processor cuts an image into.
# Behavior: it does if size.longest_edge is a multiple of max_image_size.longest_edge (the published files), not otherwise.
# Output:   longest edge 1200, tiles of 512, an image of 640 x 480: 10 tiles in 3 rows are made, 7 in 2 rows are counted.
# Why:      a context or a batch that is planned by the count has three tiles too few places, 64 tokens each in SmolVLM,
#           after somebody lowers size.longest_edge to save memory.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q --no-compile transformers==5.23.0 numpy==2.4.6 pillow==13.0.0
cd "$folder"
"$folder/venv/bin/python" - 2>"$folder/errors" <<'PY' || { tail -20 "$folder/errors"; exit 1; }
import numpy
from PIL import Image
from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil
from transformers.models.smolvlm.image_processing_pil_smolvlm import SmolVLMImageProcessorPil

image = Image.fromarray(numpy.zeros((480, 640, 3), numpy.uint8))
for kind in (Idefics3ImageProcessorPil, SmolVLMImageProcessorPil):
    found = []
    for longest in (1536, 1200):
        processor = kind(size={"longest_edge": longest}, max_image_size={"longest_edge": 512})
        made = processor([[image]], return_tensors="np", return_row_col_info=True)
        counted, rows, _ = processor.get_number_of_image_patches(480, 640)
        tiles = made["pixel_values"].shape[1]
        print(f"{kind.__name__}, {longest}: {tiles} tiles made in {made['rows'][0][0]} rows, "
              f"{counted} counted in {rows}")
        found.append((tiles, counted))
    assert found == [(10, 10), (10, 7)], found
PY
