//! The JobSet of a run in Kubernetes (jobset.sigs.k8s.io, v1alpha2) and the ConfigMap with its recipe.
//!
//! Pods have stable names, so workers and the certificate of the run know its host. Status 75 starts a pod again, 1 and 2 end
//! the run; there is a readiness probe and no liveness probe, which would kill a run that saves a checkpoint.

use serde_json::{Value, json};

use super::LaunchPlan;
use super::manifest::yaml;
use crate::args::KubernetesArgs;

/// Where a pod has the recipe, the run directories and the credentials.
const RECIPE: &str = "/rlrun/recipe/recipe.toml";
const RUNS: &str = "/rlrun/runs";
const CREDENTIALS: &str = "/rlrun/credentials";
/// Seconds that a run has to save after SIGTERM.
const GRACE_S: u64 = 300;
/// Longest name of a JobSet, so that its pods, which have longer names, stay within the 63 characters of a DNS label.
const NAME_LENGTH: usize = 40;
/// Digits of the hash in the resource name of a run whose own name is not one.
const HASH_DIGITS: usize = 8;
/// Failures of a pod that are tried again: of the run, and of workers that may be preempted often.
const RETRIES: (u32, u32) = (50, 1000);

/// Name of the secret with the credentials of the run.
pub(crate) fn secret(plan: &LaunchPlan) -> String {
    format!("{}-credentials", resource_name(&plan.name))
}

/// The name of the resources of the run `name`: lower-case letters, digits and `-`, the first a letter. A name that is not one
/// already is shortened and gets a hash of the original, because `kubectl apply` replaces resources of the same name.
fn resource_name(name: &str) -> String {
    let plain = |c: char| if c.is_ascii_alphanumeric() { c.to_ascii_lowercase() } else { '-' };
    let found: String = name.chars().map(plain).collect();
    let found = found.trim_matches('-');
    let begins_with_letter = found.starts_with(|c: char| c.is_ascii_lowercase());
    if begins_with_letter && found == name && found.len() <= NAME_LENGTH {
        return found.to_owned();
    }
    let stem = if begins_with_letter { found.to_owned() } else { format!("run-{found}") };
    let stem: String = stem.chars().take(NAME_LENGTH - HASH_DIGITS - 1).collect();
    let hash = blake3::hash(name.as_bytes()).to_hex();
    format!("{}-{}", stem.trim_end_matches('-'), &hash[..HASH_DIGITS])
}

/// The manifest for `kubectl apply`.
pub(crate) fn manifest(plan: &LaunchPlan, args: &KubernetesArgs) -> String {
    let name = resource_name(&plan.name);
    let mut metadata = json!({ "name": name });
    if let Some(namespace) = &args.namespace {
        metadata["namespace"] = json!(namespace);
    }
    let mut of_config = metadata.clone();
    of_config["name"] = json!(format!("{name}-recipe"));
    let config = json!({
        "apiVersion": "v1", "kind": "ConfigMap", "metadata": of_config, "data": { "recipe.toml": plan.resolved },
    });
    if let Some(queue) = &args.queue {
        metadata["labels"] = json!({ "kueue.x-k8s.io/queue-name": queue });
    }
    let jobs = JobTemplates { plan, args, name: &name };
    let mut replicated = vec![jobs.lead()];
    replicated.extend((plan.trainer_ranks > 0).then(|| jobs.trainer()));
    replicated.extend((plan.rollout_workers > 0).then(|| jobs.rollout()));
    let jobset = json!({
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": metadata,
        "spec": {
            "network": { "enableDNSHostnames": true, "publishNotReadyAddresses": true },
            "successPolicy": { "operator": "All", "targetReplicatedJobs": ["lead"] },
            "failurePolicy": { "maxRestarts": 0 },
            "replicatedJobs": replicated,
        },
    });
    format!("{}---\n{}", yaml(&config), yaml(&jobset))
}

struct JobTemplates<'a> {
    plan: &'a LaunchPlan,
    args: &'a KubernetesArgs,
    name: &'a str,
}

impl JobTemplates<'_> {
    /// The URL of the run: its pod in the service of the JobSet.
    fn url(&self) -> String {
        format!("https://{0}-lead-0-0.{0}:{1}", self.name, self.plan.port)
    }

    fn lead(&self) -> Value {
        let run_dir = format!("{RUNS}/{}", self.plan.name);
        let mut command = self.plan.lead(RECIPE, &run_dir, None);
        command.extend(["--set".to_owned(), format!("buffer.credentials={CREDENTIALS:?}")]);
        let mut container = self.container(&command, Some(json!({ "name": "runs", "mountPath": RUNS })));
        container["ports"] = json!([{ "containerPort": self.plan.port }]);
        container["readinessProbe"] = json!({
            "httpGet": { "path": "/readyz", "port": self.plan.port, "scheme": "HTTPS" }, "periodSeconds": 5,
        });
        // The certificate of the run is for this name too.
        container["env"] = json!([{ "name": "RLRUN_JOIN", "value": self.url() }]);
        let claim =
            json!({ "name": "runs", "persistentVolumeClaim": { "claimName": self.args.volume_claim } });
        self.job("lead", 1, RETRIES.0, &container, vec![claim])
    }

    fn trainer(&self) -> Value {
        let mut command = self.plan.trainer(&self.url());
        command.extend(["--credentials".to_owned(), CREDENTIALS.to_owned()]);
        let mut container = self.container(&command, None);
        // The ranks of a trainer take their numbers from their pods.
        let index = json!({ "fieldRef": { "fieldPath": "metadata.annotations['batch.kubernetes.io/job-completion-index']" } });
        container["env"] = json!([{ "name": "RANK", "valueFrom": index }]);
        self.job("trainer", self.plan.trainer_ranks, RETRIES.0, &container, Vec::new())
    }

    fn rollout(&self) -> Value {
        let mut command = self.plan.rollout(RECIPE, &self.url());
        command.extend(["--credentials".to_owned(), CREDENTIALS.to_owned()]);
        let container = self.container(&command, None);
        self.job("rollout", self.plan.rollout_workers, RETRIES.1, &container, Vec::new())
    }

    /// A container that runs `command`, with the recipe, the credentials and what else is `mounted`.
    fn container(&self, command: &[String], mounted: Option<Value>) -> Value {
        let mut limits = serde_json::Map::new();
        if let Some(cpus) = self.plan.cpus {
            limits.insert("cpu".to_owned(), json!(cpus.to_string()));
        }
        if self.plan.gpus > 0 {
            limits.insert("nvidia.com/gpu".to_owned(), json!(self.plan.gpus.to_string()));
        }
        let mut mounts = vec![
            json!({ "name": "recipe", "mountPath": "/rlrun/recipe" }),
            json!({ "name": "credentials", "mountPath": CREDENTIALS }),
        ];
        mounts.extend(mounted);
        json!({
            "name": "rlrun", "image": self.args.image, "command": command, "volumeMounts": mounts,
            "resources": { "limits": limits },
        })
    }

    fn job(&self, name: &str, pods: usize, retries: u32, container: &Value, more: Vec<Value>) -> Value {
        let mut volumes = vec![
            json!({ "name": "recipe", "configMap": { "name": format!("{}-recipe", self.name) } }),
            json!({ "name": "credentials", "secret": { "secretName": secret(self.plan), "defaultMode": 0o400 } }),
        ];
        volumes.extend(more);
        let rules = json!([
            { "action": "Ignore", "onPodConditions": [{ "type": "DisruptionTarget", "status": "True" }] },
            { "action": "FailJob", "onExitCodes": { "containerName": "rlrun", "operator": "In", "values": [1, 2] } },
        ]);
        let pod = json!({ "spec": {
            "restartPolicy": "Never", "terminationGracePeriodSeconds": GRACE_S, "containers": [container], "volumes": volumes,
        } });
        json!({ "name": name, "replicas": 1, "template": { "spec": {
            "parallelism": pods, "completions": pods, "completionMode": "Indexed", "backoffLimit": retries,
            "podFailurePolicy": { "rules": rules }, "template": pod,
        } } })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn different_runs_have_different_resource_names() {
        let long = "a-long-name-of-a-run-with-many-settings-seed";
        let names = [
            "grpo-math".to_owned(),
            "grpo_math".to_owned(),
            "GRPO-math".to_owned(),
            "-grpo-math-".to_owned(),
            format!("{long}1"),
            format!("{long}2"),
            "\u{6570}\u{5b66}".to_owned(),
            "\u{6570}".to_owned(),
            "7b".to_owned(),
            "run-7b".to_owned(),
        ];
        let resources: std::collections::BTreeSet<String> =
            names.iter().map(|name| resource_name(name)).collect();
        assert_eq!(resources.len(), names.len(), "{resources:?}");
        for name in &resources {
            let plain = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '-';
            assert!(name.len() <= NAME_LENGTH && name.chars().all(plain), "{name}");
            assert!(name.starts_with(|c: char| c.is_ascii_lowercase()) && !name.ends_with('-'), "{name}");
        }
        // Kubernetes takes these as they are.
        for name in ["grpo-math", "run-7b"] {
            assert!(resources.contains(name), "{resources:?}");
        }
        assert!(resource_name("\u{6570}").starts_with("run-"));
    }
}
