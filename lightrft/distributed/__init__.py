"""Start, connect and watch the processes of a run: process groups, heartbeat, torchrun, Ray."""
