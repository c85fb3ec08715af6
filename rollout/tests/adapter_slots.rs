//! Adapters that come and go while an engine runs, each with its own version.

use std::sync::Arc;
use std::time::Duration;

use model::{FactorPair, LowRank, Sampling};
use rollout::{
    AdapterSlots, Completion, Engine, LocalSampler, RolloutError, SampleRequest, Sampler, ServedWeights,
};
use trajectory::{PolicyVersion, VersionRun};
use weights::Digest;

use crate::adapters::{adapter, with};
use crate::{CONFIG, Model, complete, request};

/// Longest wait for a receipt that was sent already.
const SOON: Duration = Duration::from_secs(5);

fn sampler(model: &Model) -> (LocalSampler, AdapterSlots) {
    LocalSampler::fixed(model.engine(CONFIG, &[])).with_slots()
}

/// A request that reaches its longest completion.
fn long(group: u64, slot: Option<usize>) -> SampleRequest {
    let mut request = with(request(group, 1, Sampling::PLAIN), slot, false);
    request.options.stop.ignore_eos = true;
    request
}

fn finish(sampler: &mut LocalSampler) -> Vec<Completion> {
    let mut all = Vec::new();
    while !sampler.is_idle() {
        all.extend(sampler.poll(Duration::ZERO).unwrap());
    }
    all.sort_by_key(|completion| completion.group);
    all
}

fn run(version: u64, len: u32) -> VersionRun {
    VersionRun { version: PolicyVersion(version), len }
}

/// What an engine with this adapter alone samples.
fn alone(model: &Model, factors: &Arc<LowRank>, group: u64) -> Vec<u32> {
    let mut engine = model.engine(CONFIG, &[]).with_adapters(vec![Arc::clone(factors)]).unwrap();
    complete(&mut engine, vec![long(group, Some(0))]).remove(0).token_ids
}

#[test]
fn an_adapter_that_is_replaced_in_flight_gives_runs_of_both_versions() {
    let model = Model::new();
    let config = model.directory.config();
    let [old, new] = [0.7, 1.3].map(|seed| adapter(config, seed));
    let (mut sampler, slots) = sampler(&model);
    let first = slots.set(4, Arc::clone(&old), PolicyVersion(10)).unwrap();
    sampler.submit(long(2, Some(4))).unwrap();
    sampler.submit(long(3, None)).unwrap();
    for _ in 0..5 {
        assert!(sampler.poll(Duration::ZERO).unwrap().is_empty());
    }
    let second = slots.set(4, Arc::clone(&new), PolicyVersion(11)).unwrap();
    let done = finish(&mut sampler);
    for (receipt, version, factors) in [(first, 10, &old), (second, 11, &new)] {
        let receipt = receipt.wait(SOON).unwrap();
        assert_eq!(receipt.version, PolicyVersion(version));
        assert_eq!(receipt.digest, Digest::of(factors.values()));
        assert_eq!(receipt.bytes, 4 * factors.values().len() as u64);
    }
    let [adapted, bare] = &done[..] else { panic!("{done:?}") };
    let of_old = adapted.versions[0].len;
    assert!(of_old > 0, "{:?}", adapted.versions);
    assert_eq!(adapted.versions, [run(10, of_old), run(11, 24 - of_old)]);
    assert_eq!(adapted.prompt_version, PolicyVersion(10));
    assert_eq!(adapted.prefill, [run(10, adapted.prompt_length as u32)]);
    assert_eq!(bare.versions, [run(0, 24)], "the weights alone have the version of the engine");
    let begins = adapted.prompt_length + of_old as usize;
    assert_eq!(adapted.token_ids[..begins], alone(&model, &old, 2)[..begins]);
    assert_ne!(adapted.token_ids, alone(&model, &old, 2), "the new version samples something else");
}

#[test]
fn a_slot_that_is_freed_in_flight_can_have_another_adapter_at_once() {
    let model = Model::new();
    let config = model.directory.config();
    let [old, new] = [0.7, 1.3].map(|seed| adapter(config, seed));
    let (mut sampler, slots) = sampler(&model);
    slots.set(0, Arc::clone(&old), PolicyVersion(9)).unwrap();
    sampler.submit(long(2, Some(0))).unwrap();
    sampler.poll(Duration::ZERO).unwrap();
    slots.free(0).unwrap();
    let refused = sampler.submit(long(3, Some(0))).unwrap_err();
    assert!(matches!(refused, RolloutError::UnknownAdapter { adapter: 0, served: 0 }), "{refused}");
    slots.set(0, Arc::clone(&new), PolicyVersion(1)).unwrap();
    sampler.submit(long(4, Some(0))).unwrap();
    let done = finish(&mut sampler);
    assert_eq!(done[0].token_ids, alone(&model, &old, 2));
    assert_eq!(done[0].versions, [run(9, 24)]);
    assert_eq!(done[1].token_ids, alone(&model, &new, 4));
    assert_eq!(done[1].versions, [run(1, 24)]);
    assert_eq!(Arc::strong_count(&old), 1, "the memory of a freed adapter is freed after its sequences");
    slots.free(0).unwrap();
    slots.free(7).unwrap();
    assert!(sampler.newer_weights(Duration::ZERO).unwrap().is_none());
    assert_eq!(Arc::strong_count(&new), 1, "without sequences at once");
}

/// Neither another version of an adapter nor another adapter of its slot continues keys and values of the one before.
#[test]
fn prefixes_of_a_slot_that_changes_are_forgotten() {
    let model = Model::new();
    let config = model.directory.config();
    let mut engine = model.engine(CONFIG, &[]);
    let asked = |slot| {
        with(SampleRequest { prompt: (4..39).collect(), ..request(1, 1, Sampling::GREEDY) }, slot, true)
    };
    let reused = |engine: &mut Engine| {
        let before = engine.counts().reused_tokens;
        complete(engine, vec![asked(Some(3))]);
        engine.counts().reused_tokens - before
    };
    complete(&mut engine, vec![asked(None)]);
    engine.set_adapter(3, adapter(config, 0.7), PolicyVersion(1)).unwrap();
    assert_eq!(reused(&mut engine), 0);
    assert!(reused(&mut engine) >= 16);
    engine.set_adapter(3, adapter(config, 0.7), PolicyVersion(1)).unwrap();
    assert!(reused(&mut engine) >= 16, "nothing changed");
    engine.set_adapter(3, adapter(config, 1.3), PolicyVersion(2)).unwrap();
    assert_eq!(reused(&mut engine), 0);
    // One that began under the version before leaves nothing to later ones.
    engine.submit(asked(Some(3))).unwrap();
    engine.step().unwrap();
    engine.set_adapter(3, adapter(config, 0.9), PolicyVersion(3)).unwrap();
    while !engine.is_idle() {
        engine.step().unwrap();
    }
    assert_eq!(reused(&mut engine), 0);
    assert!(engine.free_adapter(3).unwrap());
    engine.set_adapter(3, adapter(config, 0.9), PolicyVersion(3)).unwrap();
    assert_eq!(reused(&mut engine), 0);
    let before = engine.counts().reused_tokens;
    complete(&mut engine, vec![asked(None)]);
    assert!(engine.counts().reused_tokens > before, "those of the weights alone stay");
}

#[test]
fn what_cannot_be_served_leaves_a_slot_as_it_was() {
    let model = Model::new();
    let config = model.directory.config();
    let (mut sampler, slots) = sampler(&model);
    let mut failed = |factors, version| {
        let receipt = slots.set(0, factors, PolicyVersion(version)).unwrap();
        sampler.newer_weights(Duration::ZERO).unwrap();
        receipt.wait(SOON).err()
    };
    assert!(failed(adapter(config, 0.7), 5).is_none());
    let older = failed(adapter(config, 0.9), 4).unwrap();
    assert!(matches!(older, RolloutError::OlderVersion { served: PolicyVersion(5), .. }), "{older}");
    let other = failed(adapter(config, 0.9), 5).unwrap();
    assert!(matches!(other, RolloutError::OlderVersion { .. }), "{other}");
    assert!(failed(adapter(config, 0.7), 5).is_none(), "the same values again");
    let pair = FactorPair { weight: 3..19, a: 0..4, b: 4..8, rows: 4, columns: 4, is_embedding: false };
    let strange = failed(Arc::new(LowRank::zeros(1, 1.0, vec![pair])), 6).unwrap();
    assert!(matches!(strange, RolloutError::OtherModel { slot: 0, .. }), "{strange}");
    sampler.submit(long(2, Some(0))).unwrap();
    let done = finish(&mut sampler);
    assert_eq!(done[0].token_ids, alone(&model, &adapter(config, 0.7), 2));
    assert_eq!(done[0].versions, [run(5, 24)]);
}

#[test]
fn whole_weights_come_through_the_same_handle() {
    let model = Model::new();
    let (mut sampler, slots) = sampler(&model);
    let other = model.other_parameters();
    let (digest, bytes) = (Digest::of(other.values()), 4 * other.values().len() as u64);
    let served = || ServedWeights::from(model.decoder(&other));
    sampler.submit(long(2, None)).unwrap();
    for _ in 0..4 {
        sampler.poll(Duration::ZERO).unwrap();
    }
    let receipt = slots.set_weights(served(), digest, bytes, PolicyVersion(2)).unwrap();
    let done = finish(&mut sampler);
    assert_eq!(receipt.wait(SOON).unwrap().digest, digest);
    let of_old = done[0].versions[0].len;
    assert_eq!(done[0].versions, [run(0, of_old), run(2, 24 - of_old)]);
    assert_eq!(sampler.version(), PolicyVersion(2));
    let older = slots.set_weights(served(), digest, bytes, PolicyVersion(1)).unwrap();
    sampler.newer_weights(Duration::ZERO).unwrap();
    assert!(matches!(older.wait(SOON), Err(RolloutError::OlderVersion { .. })));
    let waiting = slots.set_weights(served(), digest, bytes, PolicyVersion(3)).unwrap();
    let late = waiting.wait(Duration::from_millis(1)).unwrap_err();
    assert!(matches!(late, RolloutError::Deadline { .. }), "{late}");
    let waiting = slots.set_weights(served(), digest, bytes, PolicyVersion(3)).unwrap();
    drop(sampler);
    assert!(matches!(waiting.wait(SOON), Err(RolloutError::Ended { .. })));
    assert!(matches!(slots.free(0), Err(RolloutError::Ended { .. })));
}
