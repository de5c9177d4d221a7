"""Engines that span nodes under a real MPI: this machine as several nodes, a stand-in for the engine."""
