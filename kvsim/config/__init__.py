"""The tables of a scenario, one module for each part of the machine room; `kvsim.scenario` puts them together."""
