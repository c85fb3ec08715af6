//! Every metric of a run with its unit and its meaning, for `rlrun explain` and the book.
//!
//! Invariant: a metric that a run writes is in this table; builds with debug assertions check it at every line. Metrics that
//! users name themselves, such as the details of a reward, are patterns.

/// A metric, or several of one meaning.
#[derive(Clone, Copy, Debug)]
pub(crate) struct MetricMeaning {
    /// Names apart by spaces; a `*` stands for any text.
    pub(crate) names: &'static str,
    /// The unit of its values.
    pub(crate) unit: &'static str,
    /// What it measures.
    pub(crate) about: &'static str,
}

/// The metrics of one kind.
#[derive(Clone, Copy, Debug)]
pub(crate) struct MetricSection {
    /// What they are of.
    pub(crate) title: &'static str,
    /// The metrics.
    pub(crate) metrics: &'static [MetricMeaning],
}

/// The unit of numbers without one.
const NONE: &str = "none";

const fn metric(names: &'static str, unit: &'static str, about: &'static str) -> MetricMeaning {
    MetricMeaning { names, unit, about }
}

/// All metrics. Of several that a name fits, the first counts.
pub(crate) const METRICS: &[MetricSection] = &[
    MetricSection {
        title: "Every line",
        metrics: &[
            metric(
                "step",
                "steps",
                "Training steps done; the line of step 0 has the evaluation before training.",
            ),
            metric(
                "time_s",
                "seconds",
                "Wall time of the run, without the time between a stop and its resume.",
            ),
            metric(
                "bottleneck",
                "text",
                "Which side the other one waits for, and what else the step has to say; absent if there is nothing.",
            ),
        ],
    },
    MetricSection {
        title: "Rewards of the trained batch",
        metrics: &[
            metric("reward/mean", "reward", "Mean reward of the trajectories of the batch."),
            metric("reward/std", "reward", "Standard deviation of the rewards of the batch."),
            metric(
                "reward/frac_zero_std",
                "share",
                "Groups whose rewards are all equal: most algorithms learn nothing from them.",
            ),
            metric(
                "reward/unjudged",
                "trajectories",
                "Left out because nothing says whether they are correct.",
            ),
            metric(
                "reward/role/*",
                "reward",
                "Mean reward of the trajectories of a role of the environment.",
            ),
            metric("reward/*/mean", "score", "Mean score of one reward, before its weight."),
            metric("reward/*/weight", NONE, "The weight of a reward in the sum, as the recipe has it."),
        ],
    },
    MetricSection {
        title: "Load of rewards during the step, trained on or not",
        metrics: &[
            metric(
                "reward/*/errors",
                "completions",
                "Completions that a reward failed for, timeouts among them.",
            ),
            metric("reward/*/timeouts", "completions", "Completions that a reward took too long for."),
            metric(
                "reward/*/latency_p50_s reward/*/latency_p95_s reward/*/latency_max_s",
                "seconds",
                "Time that a reward took for a completion: median, 95th percentile, longest.",
            ),
            metric("reward/*/queue", "completions", "Waiting for a reward at the end of the step."),
            metric(
                "reward/*/queued_p95_s",
                "seconds",
                "Time that completions waited for a reward, 95th percentile.",
            ),
            metric(
                "reward/*/detail/* reward/*/*",
                "as the reward counts",
                "Mean of a number that a reward gave beside its score, such as one of `log_metric`.",
            ),
        ],
    },
    MetricSection {
        title: "Held-out tasks",
        metrics: &[
            metric(
                "eval/accuracy eval/*/accuracy",
                "share",
                "Correct answers to the held-out tasks (`eval.correct` says which are); `eval/NAME/` for sets of their own.",
            ),
            metric(
                "eval/accuracy_low eval/accuracy_high eval/*/accuracy_low eval/*/accuracy_high",
                "share",
                "The 95 % interval of the accuracy: Wilson's, over the effective number of answers.",
            ),
            metric(
                "eval/avg@* eval/*/avg@*",
                "share",
                "The accuracy over several answers to each task (`eval.samples`).",
            ),
            metric(
                "eval/pass@* eval/*/pass@*",
                "share",
                "Unbiased estimate of the tasks that are solved at least once in so many attempts (Chen et al. 2021).",
            ),
            metric("eval/reward eval/*/reward", "reward", "Mean reward of the answers."),
            metric(
                "eval/failed eval/*/failed",
                "answers",
                "Answers that a reward failed for; they count as wrong.",
            ),
            metric(
                "eval/environment/* eval/*/environment/*",
                "events per episode",
                "As `environment/...`, over the episodes of the held-out tasks.",
            ),
            metric("eval/loss", "nats per token", "Loss on held-out demonstrations (`[supervised]`)."),
            metric(
                "eval/pair_accuracy",
                "share",
                "Held-out preference pairs that are ordered correctly (`[supervised]`).",
            ),
        ],
    },
    MetricSection {
        title: "Loss and policy",
        metrics: &[
            metric("loss/mean", "loss", "The loss of the step, as `algorithm.loss_agg` aggregates it."),
            metric(
                "loss/sum",
                "loss",
                "Of a model of the training service: the sum of the loss over the tokens of an update.",
            ),
            metric(
                "loss/tokens",
                "tokens",
                "Of a model of the training service: tokens of the passes of an update.",
            ),
            metric(
                "entropy/mean",
                "nats per token",
                "Mean entropy of the policy at the tokens that were trained on.",
            ),
            metric(
                "kl/mismatch",
                "nats per token",
                "Divergence between the policy that sampled and the one that training starts from (k3 estimate).",
            ),
            metric(
                "kl/ref",
                "nats per token",
                "Divergence of the policy from the reference (`algorithm.kl_estimator`).",
            ),
            metric(
                "logprob_abs_diff/mean logprob_abs_diff/max",
                "nats",
                "Absolute difference between the log-probabilities of sampler and trainer: mean and largest of the tokens.",
            ),
            metric(
                "is/mean is/max",
                NONE,
                "Importance weights of the tokens for the policy that sampled them, after truncation: mean and largest.",
            ),
            metric(
                "is/ess",
                "share",
                "Effective sample size of the importance weights; 1 if they are all equal.",
            ),
            metric("is/masked_frac", "share", "Tokens that a correction or `algorithm.entropy_share` masks."),
            metric(
                "clip/low_mean clip/high_mean clip/dual_mean",
                "share",
                "Tokens without a gradient because their ratio is beyond the lower bound, the upper bound, or the dual clip.",
            ),
            metric(
                "demonstrated_frac",
                "share",
                "Groups that a demonstration was trained on for (`algorithm.kind = \"hpt\"`).",
            ),
            metric(
                "pairs/accuracy",
                "share",
                "Preference pairs of the batch that are ordered correctly (`[supervised]`).",
            ),
            metric(
                "pairs/margin",
                "nats",
                "Mean margin between the chosen and the rejected of a pair (`[supervised]`).",
            ),
            metric(
                "experts/load_cv experts/load_peak",
                NONE,
                "Tokens of the experts of a layer: coefficient of variation, and the busiest expert over the mean; mean over the layers.",
            ),
            metric(
                "experts/replayed",
                "share",
                "Tokens that the trainer computes with the experts of the sampler (`rollout.routing_replay`).",
            ),
            metric(
                "experts/changed",
                "share",
                "Replayed tokens for which the router of the trainer prefers another expert, over all layers.",
            ),
            metric("critic/loss", "loss", "Mean value loss per token."),
            metric("critic/value", "reward", "Mean value that the critic predicts."),
            metric(
                "critic/explained_variance",
                NONE,
                "Variance of the returns that the critic explains; 1 is all of it.",
            ),
            metric("critic/grad_norm", NONE, "Norm of the gradient of the critic before clipping."),
            metric("optim/grad_norm", NONE, "Norm of the gradient of the last update before clipping."),
            metric("optim/lr", NONE, "Learning rate of the step."),
            metric(
                "optim/updates",
                "updates",
                "Updates of the optimizer in the step; 0 if the batch has no gradient.",
            ),
        ],
    },
    MetricSection {
        title: "Completions and episodes of the batch",
        metrics: &[
            metric(
                "prompts/mean_length",
                "tokens",
                "Mean length of the prompts, of their first turn in episodes.",
            ),
            metric(
                "completions/mean_length completions/min_length completions/max_length",
                "tokens",
                "Lengths of the completions: mean, shortest, longest.",
            ),
            metric(
                "completions/clipped_ratio",
                "share",
                "Completions that reached `rollout.max_completion_length` without an end.",
            ),
            metric(
                "environment/failed",
                "episodes",
                "Episodes that their environment failed; they are not trained on.",
            ),
            metric("environment/failed/*", "episodes", "The same by the kind of the failure."),
            metric(
                "environment/stop/*",
                "share",
                "Episodes by their end: done, or the limit that they reached.",
            ),
            metric(
                "environment/*",
                "events per episode",
                "Mean number of turns, tool calls, bad calls and what else the environment counts.",
            ),
        ],
    },
    MetricSection {
        title: "Staleness and buffer",
        metrics: &[
            metric(
                "staleness/mean staleness/p95 staleness/max",
                "versions",
                "Version of the step minus the oldest version in a sample: mean, 95th percentile, largest of the batch.",
            ),
            metric(
                "staleness/spans",
                "versions",
                "Mean number of versions that sampled the tokens of one sample.",
            ),
            metric("buffer/size", "groups", "Groups that could be leased at the end of the step."),
            metric(
                "buffer/ahead",
                "versions",
                "By how many versions samplers may run ahead of the trainer; with `buffer.adapt_staleness`.",
            ),
            metric(
                "buffer/dropped_stale",
                "groups",
                "Dropped because they exceed the bound, since the start of the run.",
            ),
            metric(
                "buffer/quarantined",
                "groups",
                "Set aside because they cannot be trained on, since the start of the run.",
            ),
            metric(
                "buffer/filling",
                "0 or 1",
                "1 while the buffer fills after a start: such batches have the completions that ended first.",
            ),
            metric(
                "peers/refused",
                "requests",
                "Input of other processes that was refused, since the start of the run.",
            ),
        ],
    },
    MetricSection {
        title: "Curation, counted in the step",
        metrics: &[
            metric(
                "curation/refilled",
                "groups",
                "Dropped because their rewards are all equal, and replaced.",
            ),
            metric(
                "curation/let_through",
                "groups",
                "With equal rewards, and kept because too many had been dropped.",
            ),
            metric("curation/retired", "tasks", "Passed over because they are solved too often."),
            metric("curation/unlearnable", "tasks", "Passed over because they were never solved."),
            metric("curation/pooled_out", "tasks", "Passed over as easy or hard ones that were not drawn."),
            metric("curation/shrunk", "groups", "Started with fewer completions."),
            metric("curation/turn_limited", "groups", "Started with a limit on the turns of their episodes."),
            metric(
                "curation/replayed_successes",
                "groups",
                "Failed in all completions, and got a stored success.",
            ),
            metric("curation/interrupted", "completions", "Got the text `rollout.interrupt_text`."),
        ],
    },
    MetricSection {
        title: "Speed",
        metrics: &[
            metric(
                "rollout/tokens_per_s",
                "tokens per second",
                "Sampled tokens over the time that the sampler worked.",
            ),
            metric(
                "rollout/running_limit",
                "sequences",
                "Sequences that a sampler runs at once, a mean over samplers; with `rollout.adapt_running`.",
            ),
            metric(
                "rollout/active_samplers",
                "samplers",
                "Samplers in processes of their own that get slots; with `placement.adapt_samplers`.",
            ),
            metric(
                "trainer/microbatch_tokens",
                "tokens",
                "Most tokens of a micro-batch of the step; with `trainer.adapt_microbatch`.",
            ),
            metric(
                "trainer/tokens_per_s",
                "tokens per second",
                "Trained tokens over the time of their passes.",
            ),
            metric(
                "rollout/idle_ratio trainer/idle_ratio",
                "share",
                "Time of the step in which a side waited for the other.",
            ),
            metric("trainer/world", "ranks", "Ranks of the trainer that made the step."),
            metric(
                "trainer/rank_wait_ratio",
                "share",
                "Time of the updates in which the trainer's ranks waited for each other, a mean over the ranks; only with \
                 `trainer.world` above 1. Waits of ranks that are a device group count as passes.",
            ),
            metric(
                "rollout/lag",
                "versions",
                "Versions between the trainer and the one that the sampler serves.",
            ),
            metric(
                "rollout/reused_tokens rollout/evicted_tokens",
                "tokens",
                "Prompt tokens that were in the prefix cache; tokens that left it for want of memory.",
            ),
            metric(
                "rollout/speculation_acceptance",
                "share",
                "Proposed tokens that the model accepted (`rollout.speculation`).",
            ),
            metric("time/step", "seconds", "Wall time of the step with its evaluation."),
            metric("time/wait_for_batch", "seconds", "The trainer waits for a batch."),
            metric("time/forward_backward", "seconds", "Packing, passes and optimizer."),
            metric(
                "time/save_ckpt",
                "seconds",
                "The trainer waits for a checkpoint: `time/wait_ckpt`, and copying or writing.",
            ),
            metric("time/wait_ckpt", "seconds", "The trainer waits until the checkpoint before is on disk."),
            metric(
                "time/write_ckpt",
                "seconds",
                "Writing checkpoints that became durable, beside the training.",
            ),
            metric("time/weight_sync", "seconds", "Publishing the new weights."),
            metric(
                "time/snapshot",
                "seconds",
                "Gathering the state of all ranks in the memory of the first; with `trainer.elastic.snapshot_every`.",
            ),
            metric(
                "time/regroup",
                "seconds",
                "Continuing with other ranks after some were lost or have joined; with `trainer.elastic.snapshot_every`.",
            ),
            metric("time/decode_stall", "seconds", "Decoding stops for new weights."),
            metric(
                "time/phase_switch",
                "seconds",
                "Sampler and trainer take turns (`placement.policy = \"colocated\"`).",
            ),
        ],
    },
    MetricSection {
        title: "Memory and weights",
        metrics: &[
            metric("memory/peak_mib", "MiB", "Most resident memory of the process so far."),
            metric(
                "memory/freed_trainer_mib memory/freed_sampler_mib",
                "MiB",
                "Memory that a side freed for the other one (`placement.policy = \"colocated\"`).",
            ),
            metric(
                "weights/bytes",
                "bytes",
                "Size of the newest version as it is sent: of the delta, or of all weights.",
            ),
            metric(
                "weights/publish_s",
                "seconds",
                "Time to publish the newest version: copy, digest, delta.",
            ),
            metric(
                "weights/density",
                "share",
                "Weights that differ from the version before, as they are sent.",
            ),
            metric("weights/subscribers", "samplers", "Samplers that receive weights."),
            metric(
                "weights/apply_s",
                "seconds",
                "From the first byte to the first step with new weights, of the slowest sampler.",
            ),
            metric(
                "weights/stall_s",
                "seconds",
                "The part of it in which the slowest sampler did not decode.",
            ),
            metric(
                "weights/received_bytes",
                "bytes",
                "Bytes that all samplers received; 0 where memory is shared.",
            ),
            metric(
                "weights/taken_bytes",
                "bytes",
                "Bytes that the ranks of all samplers took from their versions, each its part (`rollout.tensor`); 0 for one rank.",
            ),
            metric(
                "weights/sent_bytes",
                "bytes",
                "Bytes of weights that the run itself has sent over the network so far; relays send the others.",
            ),
            metric(
                "weights/relays",
                "samplers",
                "Samplers that pass weights on (`rlrun worker rollout --relay`).",
            ),
            metric(
                "weights/relay_failures",
                "versions",
                "Versions so far that a sampler took from the run because its relay was unreachable, slow or wrong.",
            ),
        ],
    },
    MetricSection {
        title: "Islands, in steps that apply an exchange",
        metrics: &[
            metric("island/round", "rounds", "Rounds that the outer weights of the island have behind them."),
            metric("island/islands", "islands", "Islands whose outer gradients are in the last round."),
            metric(
                "island/sent_bytes island/received_bytes",
                "bytes",
                "Bodies of all requests to the coordinator and of its answers since the last exchange, repetitions too.",
            ),
            metric(
                "island/wait_s",
                "seconds",
                "Time that the step has waited for the answer of the coordinator.",
            ),
            metric(
                "island/outer_grad_norm",
                "norm",
                "Norm of the outer gradient: outer weights minus weights after the local steps.",
            ),
            metric(
                "island/late",
                "0 or 1",
                "1 if the outer gradient came after its round had ended: the island continues from the outer weights.",
            ),
        ],
    },
];

/// What a metric means; `None` for a name that no run writes.
pub(crate) fn meaning(name: &str) -> Option<&'static MetricMeaning> {
    let all = || METRICS.iter().flat_map(|section| section.metrics);
    let exact = all().find(|metric| metric.names().any(|known| known == name));
    exact.or_else(|| all().find(|metric| metric.names().any(|pattern| matches(pattern, name))))
}

impl MetricMeaning {
    /// Its names and patterns.
    pub(crate) fn names(&self) -> impl Iterator<Item = &'static str> + use<> {
        self.names.split_whitespace()
    }
}

/// Whether `name` is `pattern` with some text for every star. Only the last star may stand for a text with a slash, so that
/// `reward/*/mean` is no pattern of other metrics below a reward.
fn matches(pattern: &str, name: &str) -> bool {
    let Some((start, rest)) = pattern.split_once('*') else { return pattern == name };
    let Some(tail) = name.strip_prefix(start) else { return false };
    let last = !rest.contains('*');
    let ends = tail.char_indices().map(|(at, c)| at + c.len_utf8());
    let mut ends = ends.take_while(|end| last && rest.is_empty() || !tail[..*end].contains('/'));
    ends.any(|end| matches(rest, &tail[end..]))
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn a_name_has_the_meaning_of_its_most_exact_entry() {
        for (name, names) in [
            ("reward/mean", "reward/mean"),
            ("reward/math/mean", "reward/*/mean"),
            ("reward/role/x", "reward/role/*"),
            ("reward/python/answered", "reward/*/detail/* reward/*/*"),
            ("reward/python/detail/mean", "reward/*/detail/* reward/*/*"),
            ("reward/python/a/mean", "reward/*/detail/* reward/*/*"),
            ("eval/aime/accuracy", "eval/accuracy eval/*/accuracy"),
            ("eval/pass@8", "eval/pass@* eval/*/pass@*"),
            ("eval/environment/stop/done", "eval/environment/* eval/*/environment/*"),
            ("environment/stop/done", "environment/stop/*"),
            ("environment/turns", "environment/*"),
        ] {
            assert_eq!(meaning(name).map(|found| found.names), Some(names), "{name}");
        }
        for name in
            ["", "reward", "reward/", "reward//mean", "eval/x", "eval/a/b/accuracy", "kl/reference", "time"]
        {
            assert!(meaning(name).is_none(), "{name}");
        }
    }

    #[test]
    fn entries_have_a_name_of_their_own_a_unit_and_a_sentence() {
        let mut names = BTreeSet::new();
        for metric in METRICS.iter().flat_map(|section| section.metrics) {
            assert!(metric.names().all(|name| names.insert(name)), "{}", metric.names);
            assert!(!metric.unit.is_empty() && metric.about.ends_with('.'), "{}", metric.names);
        }
    }
}
