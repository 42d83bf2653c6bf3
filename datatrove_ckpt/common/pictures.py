"""Pictures of Pillow, which is imported elsewhere."""

from typing import Any

_SUBFILE_TYPE = 254  # a tag of TIFF, with bit 0 for a preview


def tiff_pages(tiff: Any) -> list[int]:
    numbers = []
    for number in range(tiff.n_frames):
        tiff.seek(number)
        if not tiff.tag_v2.get(_SUBFILE_TYPE, 0) & 1:
            numbers.append(number)
    return numbers


def with_png_mode(image: Any) -> Any:
    """Returns a picture with 8 bits a channel; a picture of floats, which PNG refuses, as it is."""
    if image.mode.startswith("I"):
        return image.convert("I").point(lambda value: value / 256).convert("L")
    if image.mode not in ("F", "L", "LA", "RGB", "RGBA"):
        return image.convert("RGBA" if "transparency" in image.info else "RGB")
    return image
