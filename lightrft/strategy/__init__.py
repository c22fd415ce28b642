"""Strategies that train, shard and save models on one or many devices."""
