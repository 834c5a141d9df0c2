"""The testbed's engine with what only tests need: faults on order, and what it decided."""

from pathlib import Path

from connector.testbed import processes


class Engine(processes.Engine):
    """See engine_driver.py for its further commands."""

    driver = Path(__file__).with_name("engine_driver.py")
