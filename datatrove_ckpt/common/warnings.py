"""Warnings that a process logs once, however many documents cause them."""

from functools import lru_cache

from loguru import logger


@lru_cache(maxsize=100)
def warn_once(text: str) -> None:
    logger.warning(text)
