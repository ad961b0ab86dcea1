"""Quality against parallelism: tasks with answers, cells of strategy and task, curves, a gate."""
