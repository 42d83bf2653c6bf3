"""Pictures of noise, as media of documents."""

import io
import random

from datatrove.data import Media
from PIL import Image


def picture(seed=0, size=(60, 40), form="PNG", **options):
    noise = random.Random(seed).randbytes(size[0] * size[1] * 3)
    made = io.BytesIO()
    Image.frombytes("RGB", size, noise).save(made, form, **options)
    return made.getvalue()


def media(data, name="", **fields):
    return Media(id=name, type=0, url=fields.pop("url", ""), media_bytes=data, **fields)
