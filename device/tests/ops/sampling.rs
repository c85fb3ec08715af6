//! Sampled tokens against a reference that sorts.

use device::Device;
use device::ops::head::{HeadTarget, HeadTargets, PREDICTED, predict};
use device::ops::sampling::{
    DRAW, KEPT, RowSampling, SETTINGS, SampledRows, SampledToken, pack_kept, sample,
};

use crate::common::{devices, noise};

/// Sampling parameters of a row.
#[derive(Clone, Copy, Debug)]
struct Settings {
    temperature: f32,
    top_p: f32,
    top_k: u32,
    min_p: f32,
}

const PLAIN: Settings = Settings { temperature: 1.0, top_p: 1.0, top_k: 0, min_p: 0.0 };

/// Result of a row.
#[derive(Debug)]
struct ExpectedDraw {
    token: u32,
    logprob: f32,
    kept_count: usize,
    kept: Vec<u32>,
}

fn download(device: &Device, drawn: &mut SampledRows, rows: usize) -> Vec<ExpectedDraw> {
    let packed = device.download(drawn.draws.view(0..DRAW * rows)).unwrap();
    let ids = device.download(drawn.kept_ids.view(0..rows * KEPT)).unwrap();
    let draw = |(row, found): (usize, SampledToken)| {
        let kept = ids[row * KEPT..][..found.kept.min(KEPT)].to_vec();
        ExpectedDraw { token: found.token, logprob: found.logprob, kept_count: found.kept, kept }
    };
    let draws: Vec<ExpectedDraw> = SampledToken::unpack(&packed).enumerate().map(draw).collect();
    pack_kept(device, rows, drawn).unwrap();
    let listed = draws.iter().filter(|draw| draw.kept_count <= KEPT);
    let lists: Vec<u32> = listed.flat_map(|draw| draw.kept.iter().copied()).collect();
    assert_eq!(device.download(drawn.packed_ids.view(0..lists.len())).unwrap(), lists);
    draws
}

impl Settings {
    fn pack(self, uniform: f32) -> [u32; SETTINGS] {
        let Self { temperature, top_p, top_k, min_p } = self;
        RowSampling { temperature, top_p, min_p, uniform, top_k }.pack()
    }
}

/// Samples a token for each row of `logits [n, V]`.
fn draws(device: &Device, logits: &[f32], rows: &[(Settings, f32)]) -> Vec<ExpectedDraw> {
    let choices: Vec<u32> = rows.iter().flat_map(|(asked, uniform)| asked.pack(*uniform)).collect();
    let (logits_there, choices) = (device.upload(logits).unwrap(), device.upload(&choices).unwrap());
    let mut drawn = SampledRows::new(device, rows.len() + 1).unwrap();
    sample(device, logits_there.all(), logits.len() / rows.len(), choices.all(), &mut drawn).unwrap();
    download(device, &mut drawn, rows.len())
}

/// Top-k, then top-p within it, then min-p, ascending by id; `None` without truncation.
fn kept_tokens(logits: &[f32], asked: Settings) -> Option<Vec<u32>> {
    if asked.top_p >= 1.0 && asked.top_k == 0 && asked.min_p <= 0.0 || asked.temperature == 0.0 {
        return None;
    }
    let mut ids: Vec<u32> = (0..logits.len() as u32).collect();
    ids.sort_by(|a, b| logits[*b as usize].total_cmp(&logits[*a as usize]).then(a.cmp(b)));
    if asked.top_k > 0 {
        ids.truncate(asked.top_k as usize);
    }
    let top = f64::from(logits[ids[0] as usize]);
    let weight = |id: u32| ((f64::from(logits[id as usize]) - top) / f64::from(asked.temperature)).exp();
    if asked.top_p < 1.0 {
        // A share that is reached exactly ends the nucleus.
        let limit = f64::from(asked.top_p) * ids.iter().map(|id| weight(*id)).sum::<f64>() * (1.0 - 1e-9);
        let mut reached = 0.0;
        let last = ids.iter().position(|id| {
            reached += weight(*id);
            reached >= limit
        });
        ids.truncate(last.map_or(ids.len(), |last| last + 1));
    }
    if asked.min_p > 0.0 {
        ids.truncate(ids.partition_point(|id| weight(*id) >= f64::from(asked.min_p)).max(1));
    }
    ids.sort_unstable();
    Some(ids)
}

/// Checks one sampled token against the reference.
fn check(logits: &[f32], asked: Settings, uniform: f32, found: &ExpectedDraw) {
    let name = format!("{asked:?} {uniform} of {}", logits.len());
    if asked.temperature == 0.0 {
        let top = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        let first = logits.iter().position(|z| *z == top).unwrap();
        assert_eq!((found.token as usize, found.logprob, found.kept_count), (first, 0.0, 0), "{name}");
        return;
    }
    let kept = kept_tokens(logits, asked);
    assert_eq!(found.kept_count, kept.as_ref().map_or(0, Vec::len), "{name}");
    if found.kept_count > KEPT {
        return;
    }
    let candidates = kept.clone().unwrap_or_else(|| (0..logits.len() as u32).collect());
    assert_eq!(found.kept, kept.unwrap_or_default(), "{name}");
    let scaled = |id: u32| f64::from(logits[id as usize]) / f64::from(asked.temperature);
    let top = candidates.iter().map(|id| scaled(*id)).fold(f64::NEG_INFINITY, f64::max);
    let total: f64 = candidates.iter().map(|id| (scaled(*id) - top).exp()).sum();
    let slot = candidates.binary_search(&found.token).expect("a candidate is drawn");
    let before: f64 = candidates[..slot].iter().map(|id| (scaled(*id) - top).exp() / total).sum();
    let own = (scaled(found.token) - top).exp() / total;
    let u = f64::from(uniform);
    assert!(before - 1e-5 <= u && u <= before + own + 1e-5, "{name}: {u} in {before} + {own}");
    let off = f64::from(found.logprob) - own.ln();
    assert!(found.logprob <= 0.0 && off.abs() < 1e-5 * own.ln().abs().max(1.0), "{name}: {off}");
}

/// Parameters of every kind.
fn all_settings() -> Vec<Settings> {
    vec![
        PLAIN,
        Settings { temperature: 0.0, ..PLAIN },
        Settings { temperature: 0.0, top_k: 3, ..PLAIN },
        Settings { temperature: 0.7, ..PLAIN },
        Settings { temperature: 1.6, top_k: 1, ..PLAIN },
        Settings { top_k: 5, ..PLAIN },
        Settings { top_k: 50, temperature: 1.3, ..PLAIN },
        Settings { top_k: 100_000, ..PLAIN },
        Settings { top_k: 4500, temperature: 2.0, top_p: 0.6, ..PLAIN },
        Settings { top_p: 0.8, ..PLAIN },
        Settings { top_p: 0.999, temperature: 2.5, ..PLAIN },
        Settings { top_p: 0.0, ..PLAIN },
        Settings { min_p: 0.2, temperature: 1.4, ..PLAIN },
        Settings { min_p: 1e-6, temperature: 3.0, ..PLAIN },
        Settings { min_p: 1.0, ..PLAIN },
        Settings { min_p: 1.5, ..PLAIN },
        Settings { top_k: 20, top_p: 0.95, temperature: 0.6, ..PLAIN },
        Settings { top_k: 40, top_p: 0.9, min_p: 0.05, temperature: 1.2 },
    ]
}

fn check_all(device: &Device, vocabulary: usize, logit: impl Fn(f32) -> f32) {
    let uniform = noise(40, 9);
    let rows: Vec<_> = all_settings().into_iter().zip(uniform.iter().map(|u| u.abs())).collect();
    let logits: Vec<f32> = noise(vocabulary * rows.len(), 11).into_iter().map(logit).collect();
    let found = draws(device, &logits, &rows);
    for ((row, (asked, uniform)), found) in logits.chunks(vocabulary).zip(&rows).zip(&found) {
        check(row, *asked, *uniform, found);
    }
}

#[test]
fn truncation_and_drawing_follow_the_rules() {
    for device in devices() {
        for vocabulary in [1, 7, 37, 1000, 4099, 9001] {
            check_all(&device, vocabulary, |z| 9.0 * z);
        }
    }
}

/// Many equal logits of both signs: a cut among them is by id.
#[test]
fn equal_logits_are_ordered_by_id() {
    for device in devices() {
        for vocabulary in [37, 1000, 9001] {
            check_all(&device, vocabulary, |z| (4.0 * z).round() / 2.0);
            check_all(&device, vocabulary, |_| -3.0);
        }
    }
}

#[test]
fn sample_frequencies_match_probabilities() {
    let count = 120;
    let base: Vec<f32> = noise(20, 3).iter().map(|z| 3.0 * z).collect();
    let logits = base.repeat(count);
    for device in devices() {
        for asked in [
            PLAIN,
            Settings { temperature: 0.7, ..PLAIN },
            Settings { top_k: 5, ..PLAIN },
            Settings { top_p: 0.8, ..PLAIN },
            Settings { min_p: 0.2, temperature: 1.4, ..PLAIN },
        ] {
            let rows: Vec<_> = (0..count).map(|i| (asked, (i as f32 + 0.5) / count as f32)).collect();
            let mut hits = [(0_u32, 0.0_f32); 20];
            for draw in draws(&device, &logits, &rows) {
                hits[draw.token as usize].0 += 1;
                hits[draw.token as usize].1 = draw.logprob;
            }
            for (hits, logprob) in hits.into_iter().filter(|(hits, _)| *hits > 0) {
                let expected = f64::from(logprob.exp()) * count as f64;
                assert!((f64::from(hits) - expected).abs() < 2.5, "{asked:?}: {hits} of {expected}");
            }
        }
    }
}

#[test]
fn tokens_of_probability_0_are_never_sampled() {
    let mut logits = vec![f32::NEG_INFINITY; 3000];
    logits[7] = 1.0;
    logits[2900] = 2.0;
    for device in devices() {
        for asked in [PLAIN, Settings { top_k: 10, ..PLAIN }, Settings { top_p: 0.999, ..PLAIN }] {
            for (uniform, token) in [(0.0, 7), (0.2, 7), (0.3, 2900), (0.999_999_94, 2900)] {
                let found = draws(&device, &logits, &[(asked, uniform)]);
                assert_eq!(found[0].token, token, "{asked:?} {uniform}");
            }
        }
    }
}

/// The sampler's log-probabilities have the bits of the trainer's for equal logits.
#[test]
fn log_probabilities_have_the_bits_of_the_head() {
    let vocabulary = 3001;
    let rows: Vec<_> = all_settings()
        .into_iter()
        .filter(|asked| asked.temperature > 0.0)
        .zip(noise(40, 13).into_iter().map(f32::abs))
        .collect();
    let logits: Vec<f32> = noise(vocabulary * rows.len(), 12).iter().map(|z| 8.0 * z).collect();
    for device in devices() {
        let found = draws(&device, &logits, &rows);
        let targets = found.iter().zip(&rows).map(|(draw, (asked, _))| HeadTarget {
            token: draw.token,
            temperature: asked.temperature,
            kept: (draw.kept_count > 0).then_some(&draw.kept[..]),
        });
        let targets = HeadTargets::new(&device, targets).unwrap();
        let (there, mut out) =
            (device.upload(&logits).unwrap(), device.uninit(PREDICTED * rows.len()).unwrap());
        predict(&device, there.all(), vocabulary, &targets, 0, out.all_mut()).unwrap();
        let predicted = device.download(out.all()).unwrap();
        for (found, predicted) in found.iter().zip(predicted.chunks(PREDICTED)) {
            assert_eq!(found.logprob.to_bits(), predicted[0].to_bits(), "{} {}", found.logprob, predicted[0]);
        }
    }
}

/// A decode step is recorded once; the host changes its parameters and replays it.
#[test]
fn sampling_can_be_replayed() {
    let vocabulary = 300;
    let logits: Vec<f32> = noise(vocabulary, 14).iter().map(|z| 5.0 * z).collect();
    let asked = Settings { top_p: 0.9, ..PLAIN };
    for device in devices() {
        let there = device.upload(&logits).unwrap();
        let mut choice = device.zeros::<u32>(SETTINGS).unwrap();
        let mut drawn = SampledRows::new(&device, 1).unwrap();
        // Kernels have to be loaded before a capture.
        sample(&device, there.all(), vocabulary, choice.all(), &mut drawn).unwrap();
        let graph = {
            let choice = choice.all();
            device.record(|| sample(&device, there.all(), vocabulary, choice, &mut drawn)).unwrap()
        };
        for uniform in [0.1, 0.5, 0.9] {
            device.upload_to(&asked.pack(uniform), choice.all_mut()).unwrap();
            graph.replay().unwrap();
            check(&logits, asked, uniform, &download(&device, &mut drawn, 1)[0]);
        }
    }
}

/// NaN logits cause neither an error nor an invalid token id, and are visible in the result.
#[test]
fn nan_logits_give_a_nan_log_probability() {
    let vocabulary = 300;
    let mut logits = noise(4 * vocabulary, 15);
    logits[..vocabulary].fill(f32::NAN);
    logits[vocabulary..2 * vocabulary].fill(f32::NEG_INFINITY);
    logits[2 * vocabulary + 7] = f32::INFINITY;
    logits[3 * vocabulary + 7] = f32::NAN;
    for device in devices() {
        for asked in all_settings() {
            let found = draws(&device, &logits, &[(asked, 0.5); 4]);
            assert!(found.iter().all(|draw| (draw.token as usize) < vocabulary), "{asked:?} {found:?}");
            if asked.min_p > 0.0 && asked.temperature > 0.0 {
                assert!(found[..3].iter().all(|draw| draw.logprob.is_nan()), "{asked:?} {found:?}");
            }
        }
    }
}

#[test]
fn zero_rows_are_a_no_op() {
    for device in devices() {
        let (floats, numbers) = (device.zeros::<f32>(0).unwrap(), device.zeros::<u32>(0).unwrap());
        let mut drawn = SampledRows::new(&device, 0).unwrap();
        sample(&device, floats.all(), 10, numbers.all(), &mut drawn).unwrap();
        pack_kept(&device, 0, &mut drawn).unwrap();
    }
}
