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
/// Failures of a pod that are tried again: of the run, and of workers that may be preempted often.
const RETRIES: (u32, u32) = (50, 1000);

/// Name of the secret with the credentials of the run.
pub(crate) fn secret(plan: &LaunchPlan) -> String {
    format!("{}-credentials", resource_name(plan))
}

/// A name that Kubernetes takes for resources: letters, digits and `-`, at most 40 of them, so that pods can have longer ones.
fn resource_name(plan: &LaunchPlan) -> String {
    let plain = |c: char| if c.is_ascii_alphanumeric() { c.to_ascii_lowercase() } else { '-' };
    let name: String = plan.name.chars().map(plain).take(40).collect();
    let name = name.trim_matches('-');
    // A DNS label of a service begins with a letter.
    if name.starts_with(|c: char| c.is_ascii_lowercase()) { name.to_owned() } else { format!("run-{name}") }
}

/// The manifest for `kubectl apply`.
pub(crate) fn manifest(plan: &LaunchPlan, args: &KubernetesArgs) -> String {
    let name = resource_name(plan);
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
