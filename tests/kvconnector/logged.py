"""What a module of the connector says in the log, whether or not vLLM has set its loggers up."""

import contextlib
import logging


@contextlib.contextmanager
def logged(module, level):
    """The messages of at least `level`, as they come."""
    said = []

    class Handler(logging.Handler):
        def emit(self, record):
            said.append(record.getMessage())

    logger, handler = logging.getLogger(f"vllm.{module}"), Handler(level)
    before = logger.level
    logger.addHandler(handler)
    logger.setLevel(level)
    try:
        yield said
    finally:
        logger.removeHandler(handler)
        logger.setLevel(before)
