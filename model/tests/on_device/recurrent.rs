//! Layers with a gated DeltaNet on a device: passes over packs, and the states that sequences keep between steps.

use device::Device;
use device::device::DeviceLocation;
use model::on_device::{DeviceDecoder, DeviceSampler, DrawRequest, StagedWeights};
use model::{
    Config, Decoder, DeltaNetFiles, DeltaNetSpec, Draw, Head, KvCache, LayerSpec, Layout, Norm, Recompute,
    Sampling, Sizes, ThreadPool,
};

use super::{DeviceDtype, decodes, next, parameters, prefills, trains_in_bf16, trains_in_f32};

/// Heads that share keys, whose widths are no multiple of a warp.
const SPEC: DeltaNetSpec = DeltaNetSpec {
    key_heads: 2,
    value_heads: 4,
    key_dim: 12,
    value_dim: 10,
    taps: 4,
    files: DeltaNetFiles::Apart,
};

/// Three layers, those of `which` with a recurrence of `spec`.
fn with_recurrence(spec: DeltaNetSpec, which: [bool; 3]) -> Config {
    let sizes = Sizes {
        vocab_size: 29,
        hidden_size: 32,
        intermediate_size: 24,
        num_layers: 3,
        num_heads: 4,
        num_kv_heads: 2,
        max_position_embeddings: 256,
    };
    let mut config = Config::fresh(&sizes);
    for (layer, recurs) in config.layers.iter_mut().zip(which) {
        layer.delta_net = recurs.then_some(spec);
    }
    config
}

/// Configurations with a name.
pub(super) fn configs() -> Vec<(&'static str, Config)> {
    let wide = DeltaNetSpec { key_heads: 1, value_heads: 1, key_dim: 36, value_dim: 40, taps: 2, ..SPEC };
    let around = |layer| LayerSpec { norm: Norm::RmsAround, residual_multiplier: 0.7, ..layer };
    let attends_last = with_recurrence(SPEC, [true, true, false]);
    vec![
        ("attention last", attends_last.clone()),
        ("attention first", with_recurrence(wide, [false, true, true])),
        ("attention between", with_recurrence(SPEC, [true, false, true])),
        (
            "norms around, and a value head",
            Config { head: Head::LanguageAndValue, norm_offset: 1.0, ..attends_last.map_layers(around) },
        ),
    ]
}

#[test]
fn recurrences_train_in_f32() {
    for (name, config) in configs() {
        trains_in_f32(&config, name);
    }
}

#[test]
fn recurrences_train_in_bf16() {
    for (name, mut config) in configs() {
        // Rounding adds up over layers.
        config.layers.truncate(2);
        trains_in_bf16(&config, name);
    }
}

#[test]
fn recurrences_decode() {
    for (_, config) in configs() {
        decodes(DeviceDtype::F32, &config, 1e-4);
        decodes(DeviceDtype::Bf16, &config, 0.3);
    }
}

#[test]
fn recurrences_prefill_beside_decoding() {
    for (_, config) in configs() {
        prefills(&config);
    }
}

/// The cache and the network of a processor, and those of a device.
struct Both {
    decoder: Decoder,
    sampler: DeviceSampler,
    caches: [KvCache; 2],
}

impl Both {
    fn new() -> Self {
        let config = with_recurrence(SPEC, [true, false, true]);
        let (parameters, device) = (parameters(&config), Device::open(DeviceLocation::of_tests()).unwrap());
        let staged = StagedWeights::upload(&device, DeviceDtype::F32, &parameters).unwrap();
        Self {
            decoder: Decoder::new(&config, &parameters),
            sampler: DeviceSampler::new(&device, &config, staged).unwrap(),
            caches: [KvCache::new(&config, 20 * 16), KvCache::elsewhere(&config, 20 * 16)],
        }
    }

    /// Does the same with both caches.
    fn each<R>(&mut self, work: impl FnMut(&mut KvCache) -> R) -> [R; 2] {
        self.caches.each_mut().map(work)
    }

    /// Feeds the tokens of all sequences from their positions on; what the last of each predicts is the same.
    fn feed(&mut self, sequences: &mut [(&mut Vec<u32>, &[u32], usize)]) {
        for (pages, tokens, position) in sequences.iter_mut() {
            let [here, there] = self.each(|cache| {
                let mut own = pages.clone();
                cache.make_writable(&mut own, *position, *position + tokens.len());
                own
            });
            assert_eq!(here, there, "both caches hand out the same pages");
            **pages = here;
        }
        let steps: Vec<_> =
            sequences.iter().map(|(pages, tokens, position)| next(tokens, *position, pages, 1)).collect();
        let logits = self.decoder.step(&mut self.caches[0], &steps, &ThreadPool::single()).unwrap();
        self.sampler.step(&mut self.caches[1], &steps).unwrap();
        let sampling = Sampling { temperature: 0.7, ..Sampling::PLAIN };
        let width = self.decoder.config().vocab_size;
        for (row, logits) in logits.chunks(width).enumerate() {
            let expected = Draw::new(&mut logits.to_vec(), sampling, 0.4);
            let found = self.sampler.draw(&[DrawRequest { row, sampling, uniform: 0.4 }]).unwrap().remove(0);
            assert_eq!(found.token, expected.token, "sequence {row}");
            assert!((found.logprob - expected.logprob).abs() < 1e-4, "{found:?}, not {expected:?}");
        }
    }

    fn resumable(&mut self, pages: &[u32], tokens: usize) -> usize {
        let [here, there] = self.each(|cache| cache.resumable(pages, tokens));
        assert_eq!(here, there, "both caches resume at the same positions");
        here
    }
}

/// A state goes along with its sequence, stays where it is asked to, and is copied for all that continue a shared prefix, in steps
/// that need more slots than those before.
#[test]
fn states_are_copied_kept_and_lost_as_on_the_processor() {
    let all: Vec<u32> = (0..60).map(|i| (i * i * 31 + i * 17) % 29).collect();
    let mut both = Both::new();
    let mut first = Vec::new();
    for (start, end) in [(0, 10), (10, 16), (16, 17), (17, 40)] {
        both.feed(&mut [(&mut first, &all[start..end], start)]);
    }
    both.each(|cache| cache.keep_state(&first, 40));
    both.feed(&mut [(&mut first, &all[40..50], 40)]);
    assert_eq!(both.resumable(&first, 55), 50);
    assert_eq!(both.resumable(&first, 45), 40);
    // Six sequences continue the kept prefix, beside the one that goes on.
    let mut others = vec![first[..3].to_vec(); 6];
    others.iter().for_each(|pages| both.caches.iter_mut().for_each(|cache| cache.share(pages)));
    let mut position = 40;
    for count in [3, 1, 1, 1] {
        let mut step: Vec<(&mut Vec<u32>, &[u32], usize)> = Vec::new();
        for (number, pages) in others.iter_mut().enumerate() {
            step.push((pages, &all[position - 30 + number..][..count], position));
        }
        both.feed(&mut step);
        position += count;
    }
    both.feed(&mut [(&mut first, &all[50..53], 50)]);
    // The slots of what ended are taken by others.
    for pages in others.drain(..4) {
        both.each(|cache| cache.release(&pages));
    }
    let mut fresh = [Vec::new(), Vec::new()];
    let [a, b] = &mut fresh;
    let (c, d) = (&mut first, &mut others[1]);
    both.feed(&mut [
        (c, &all[53..54], 53),
        (d, &all[9..10], position),
        (a, &all[..7], 0),
        (b, &all[2..40], 0),
    ]);
    // After a sleep nothing is left to resume from.
    both.sampler.forget();
    both.each(KvCache::forget);
    let config = both.decoder.config().clone();
    both.each(|cache| cache.restore(&config));
    assert_eq!(both.resumable(&first, 54), 0);
    both.feed(&mut [(&mut first, &all[..54], 0)]);
    let error = both.sampler.step(&mut both.caches[1], &[next(&all[..1], 20, &first, 1)]).unwrap_err();
    assert!(error.to_string().contains("no recurrent state at position 20"), "{error}");
}

#[test]
fn other_recurrences_are_refused_by_name() {
    let device = Device::open(DeviceLocation::of_tests()).unwrap();
    let mut several = with_recurrence(SPEC, [true; 3]);
    several.layers[1].delta_net = Some(DeltaNetSpec { key_dim: 8, ..SPEC });
    for (config, what) in [
        (several, "recurrences of several sizes"),
        (with_recurrence(DeltaNetSpec { taps: 9, ..SPEC }, [true; 3]), "convolutions"),
        (with_recurrence(DeltaNetSpec { value_dim: 264, ..SPEC }, [true; 3]), "heads of recurrences"),
    ] {
        let layout = std::sync::Arc::new(Layout::new(&config));
        let error = DeviceDecoder::<f32>::new(&device, &config, &layout, Recompute::None).unwrap_err();
        assert!(error.to_string().contains(what), "{error}");
    }
}
