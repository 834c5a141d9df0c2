"""How bytes move: links shared fairly, networks of them, the threads that start transfers."""
