#!/usr/bin/env python3
"""The manifests of `rlrun launch` are what Kubernetes and SkyPilot take: python3 check_manifests.py RLRUN

The types of JobSet and of Kubernetes come from the package kubeflow-trainer-api, which is generated of their published schemas:
a document that comes back unchanged has no unknown field and no value of another type. SkyPilot reads its task itself.
"""

import copy
import json
import subprocess
import sys
import tempfile

import yaml

RECIPE = "recipes/grpo_math.toml"
VARIANTS = [
    [],
    ["--gpus", "8", "--cpus", "16", "--rollout-workers", "3", "--set", "trainer.world=2", "--set", "trainer.ranks=processes"],
]


def launched(rlrun, *arguments):
    command = [rlrun, "launch", *arguments, "--dry-run"]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def kubernetes(rlrun):
    from kubeflow_trainer_api.models import IoK8sApiCoreV1PodSpec, JobsetV1alpha2JobSet

    for more in VARIANTS:
        arguments = ["--image", "rlrun:1", "--volume-claim", "runs", "--namespace", "team", "--queue", "q", *more]
        config, jobset = yaml.safe_load_all(launched(rlrun, "kubernetes", RECIPE, *arguments))
        assert config["kind"] == "ConfigMap" and "[trainer]" in config["data"]["recipe.toml"], config
        compare(jobset, JobsetV1alpha2JobSet.from_dict(jobset).to_dict(), "JobSet")
        for job in jobset["spec"]["replicatedJobs"]:
            pod = job["template"]["spec"]["template"]["spec"]
            compare(pod, IoK8sApiCoreV1PodSpec.from_dict(pod).to_dict(), job["name"])
        print("ok JobSet", jobset["metadata"]["name"], [job["name"] for job in jobset["spec"]["replicatedJobs"]])


def compare(sent, read, path):
    """Every field that was sent was understood."""
    if isinstance(sent, dict):
        assert isinstance(read, dict), (path, sent, read)
        for key, value in sent.items():
            assert key in read, "%s.%s is no field" % (path, key)
            compare(value, read[key], "%s.%s" % (path, key))
    elif isinstance(sent, list):
        assert len(sent) == len(read), path
        for number, (one, other) in enumerate(zip(sent, read)):
            compare(one, other, "%s[%d]" % (path, number))
    else:
        assert json.dumps(sent) == json.dumps(read), (path, sent, read)


def skypilot(rlrun):
    from sky import Task

    for more in [[], ["--accelerators", "H100:8", "--cpus", "16", "--rollout-workers", "3"]]:
        text = launched(rlrun, "skypilot", RECIPE, "--run-dir", "runs/a", *more)
        config = yaml.safe_load(text)
        # The files that are copied exist only when the task is submitted.
        with tempfile.TemporaryDirectory() as directory:
            config["file_mounts"] = {path: directory for path in config["file_mounts"]}
            task = Task.from_yaml_config(copy.deepcopy(config))
        assert task.num_nodes == config["num_nodes"] and "--by-rank" in task.run, task
        print("ok SkyPilot", task.name, task.num_nodes, "nodes", json.dumps(config["resources"]))


if __name__ == "__main__":
    program = sys.argv[1]
    kubernetes(program)
    skypilot(program)
