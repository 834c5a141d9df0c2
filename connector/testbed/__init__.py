"""The real engine and the real store on this machine, each in a process of its own.

What the end-to-end tests, the connector's demo and its benchmark run on. Never installed.
"""
