"""Reads TF_CONFIG as tf.distribute.cluster_resolver.TFConfigClusterResolver does."""

import json
import os

config = json.loads(os.environ["TF_CONFIG"])
cluster, task = config["cluster"], config["task"]
workers = cluster["worker"]
assert set(config) == {"cluster", "task"} and set(cluster) == {"worker"} and set(task) == {"type", "index"}
assert len(set(workers)) == len(workers) and isinstance(task["index"], int)
print(task["type"], task["index"], "of", len(workers), "at", workers[task["index"]])
