//! The size of a micro-batch, chosen by the throughput that it has.
//!
//! A large micro-batch fills the cores of a device, and a small one stays in the caches of a processor. Which one is faster depends on
//! the model, the lengths and what else runs on the cores, so sizes are compared in the run: steps use them in turns, so that a
//! change of the load concerns all, and those that are clearly slower are left out after each round. Between comparisons the size is fixed; a
//! comparison that confirms it doubles the time until the next one. The first one goes down to a quarter of the largest size, later
//! ones try twice and half of the size.
//!
//! Invariant: no size is larger than the configured one, for which activations are planned. All updates of a step have one size.

use buffer::TrialPause;

/// Least tokens of a micro-batch to choose from.
pub const LEAST_TOKENS: usize = 128;
/// Sizes to choose from, each half of the one before.
const SIZES: usize = 4;
/// Share of the throughput of the fastest size below which a size is left out, by rounds so far. The last one is the margin within
/// which the larger of two sizes is taken, which needs fewer passes.
const SLOWER: [f64; 4] = [0.75, 0.88, 0.94, 0.97];
/// Steps before the first comparison: memory is touched for the first time.
const FIRST_STEPS: u64 = 2;
/// Steps after a comparison that confirms the size, doubled each time, up to [`LONGEST_PAUSE_STEPS`].
const PAUSE_STEPS: u64 = 48;
/// See [`PAUSE_STEPS`].
const LONGEST_PAUSE_STEPS: u64 = 1536;

/// What the updates of a step took: their passes, the exchange between ranks and the optimizer.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct UpdateTime {
    /// Tokens of the rows, with their prompts.
    pub tokens: u64,
    /// Time, seconds.
    pub seconds: f64,
}

/// The micro-batch of a step whose size adapts.
#[derive(Clone, Debug, PartialEq)]
pub struct MicrobatchReport {
    /// Most tokens of a micro-batch of the step.
    pub tokens: usize,
    /// The change of the size that is kept, after the step.
    pub change: Option<MicrobatchChange>,
}

/// A change of the size that is kept.
#[derive(Clone, Debug, PartialEq)]
pub struct MicrobatchChange {
    /// Tokens of a micro-batch until now.
    pub before: usize,
    /// Tokens of a micro-batch from now on.
    pub after: usize,
    /// The sizes that were compared and the throughput of each, tokens per second.
    pub measured: Vec<(usize, f64)>,
}

/// Decides how many tokens a micro-batch has.
#[derive(Clone, Debug, PartialEq)]
pub struct MicrobatchControl {
    /// The sizes to choose from, descending.
    sizes: Vec<usize>,
    /// Place of the size that is kept.
    kept: usize,
    comparison: Option<Comparison>,
    /// Whether sizes have been compared.
    has_compared: bool,
    pause: TrialPause,
}

/// Sizes that take turns.
#[derive(Clone, Debug, Default, PartialEq)]
struct Comparison {
    /// Place of each size that is still compared, and its throughputs, tokens per second.
    rates: Vec<(usize, Vec<f64>)>,
    /// Whose turn it is.
    turn: usize,
    /// Sizes that were left out, with their throughput.
    left_out: Vec<(usize, f64)>,
}

impl MicrobatchControl {
    /// Begins with `most` tokens, the largest size.
    #[must_use]
    pub fn new(most: usize) -> Self {
        let halved = (0..SIZES).map(|halvings| most >> halvings);
        let sizes = halved.enumerate().filter(|(halvings, size)| *halvings == 0 || *size >= LEAST_TOKENS);
        Self {
            sizes: sizes.map(|(_, size)| size).collect(),
            kept: 0,
            comparison: None,
            has_compared: false,
            pause: TrialPause::new(PAUSE_STEPS, LONGEST_PAUSE_STEPS, FIRST_STEPS),
        }
    }

    /// The smallest size that it may choose with `most` tokens as the largest one.
    #[must_use]
    pub fn least(most: usize) -> usize {
        Self::new(most).sizes.last().copied().unwrap_or(most)
    }

    /// Tokens of a micro-batch of the next step.
    #[must_use]
    pub fn tokens(&self) -> usize {
        self.sizes[self.comparison.as_ref().map_or(self.kept, Comparison::size)]
    }

    /// Takes a step into account; the change of the size that is kept, if there is one.
    pub fn observe(&mut self, time: UpdateTime) -> Option<MicrobatchChange> {
        if time.tokens == 0 || time.seconds <= 0.0 || self.sizes.len() == 1 {
            return None;
        }
        let Some(comparison) = &mut self.comparison else {
            self.pause.step();
            if self.pause.is_over() {
                self.comparison = Some(self.next_comparison());
            }
            return None;
        };
        let best = comparison.add(time.tokens as f64 / time.seconds)?;
        let measured = comparison.measured().into_iter().map(|(at, rate)| (self.sizes[at], rate)).collect();
        let before = std::mem::replace(&mut self.kept, best);
        (self.comparison, self.has_compared) = (None, true);
        if best == before {
            self.pause.begin();
        } else {
            self.pause.start_again();
        }
        (best != before).then(|| MicrobatchChange {
            before: self.sizes[before],
            after: self.sizes[best],
            measured,
        })
    }

    fn next_comparison(&self) -> Comparison {
        let halvings = if self.has_compared { 1 } else { 2 };
        let compared = (0..self.sizes.len()).filter(|at| at.abs_diff(self.kept) <= halvings);
        Comparison { rates: compared.map(|at| (at, Vec::new())).collect(), ..Comparison::default() }
    }
}

impl Comparison {
    /// Place of the size of the next step.
    fn size(&self) -> usize {
        self.rates[self.turn].0
    }

    /// Adds the throughput of a step, tokens per second. The place of the size to keep, if that is known.
    fn add(&mut self, rate: f64) -> Option<usize> {
        self.rates[self.turn].1.push(rate);
        self.turn = (self.turn + 1) % self.rates.len();
        if self.turn > 0 {
            return None;
        }
        let rounds = self.rates[0].1.len();
        let fastest = self.rates.iter().map(|(_, rates)| median(rates)).fold(0.0, f64::max);
        let least = SLOWER[rounds - 1] * fastest;
        let (stay, slower) =
            std::mem::take(&mut self.rates).into_iter().partition(|(_, rates)| median(rates) >= least);
        self.rates = stay;
        self.left_out.extend(slower.into_iter().map(|(at, rates)| (at, median(&rates))));
        (rounds == SLOWER.len() || self.rates.len() == 1).then(|| self.rates[0].0)
    }

    /// Place and throughput of all sizes, tokens per second, the largest size first.
    fn measured(&self) -> Vec<(usize, f64)> {
        let rest = self.rates.iter().map(|(at, rates)| (*at, median(rates)));
        let mut all: Vec<(usize, f64)> = self.left_out.iter().copied().chain(rest).collect();
        all.sort_by_key(|(at, _)| *at);
        all
    }
}

/// Median; of an even number the lower one of the two in the middle.
fn median(rates: &[f64]) -> f64 {
    let mut sorted = rates.to_vec();
    sorted.sort_by(f64::total_cmp);
    sorted[(sorted.len() - 1) / 2]
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Plays `steps` steps of 1000 tokens; `rate` is the throughput by size and step. Returns the size of each step.
    fn sizes(control: &mut MicrobatchControl, steps: u64, rate: impl Fn(usize, u64) -> f64) -> Vec<usize> {
        (0..steps)
            .map(|step| {
                let size = control.tokens();
                control.observe(UpdateTime { tokens: 1000, seconds: 1000.0 / rate(size, step) });
                size
            })
            .collect()
    }

    /// Pseudo-random numbers from -1 to 1.
    fn noise(step: u64) -> f64 {
        (step.wrapping_add(7).wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 40) as f64 / 8_388_608.0 - 1.0
    }

    #[test]
    fn sizes_are_halves_down_to_the_least() {
        assert_eq!(MicrobatchControl::new(4096).sizes, [4096, 2048, 1024, 512]);
        assert_eq!(MicrobatchControl::new(600).sizes, [600, 300, 150]);
        assert_eq!(MicrobatchControl::new(100).sizes, [100]);
        assert_eq!(sizes(&mut MicrobatchControl::new(100), 50, |_, _| 1.0), [100; 50]);
    }

    #[test]
    fn the_fastest_size_is_kept_and_the_larger_one_of_equals() {
        let of = |rate: &dyn Fn(usize, u64) -> f64| {
            *sizes(&mut MicrobatchControl::new(4096), 100, rate).last().unwrap()
        };
        assert_eq!(of(&|size, _| size as f64), 4096);
        assert_eq!(of(&|size, _| 1.0 / size as f64), 512, "one comparison after the other");
        assert_eq!(of(&|size, _| 1.0 / (size as f64 / 1024.0).log2().abs().exp()), 1024);
        assert_eq!(of(&|size, _| 1.0 + 0.01 * 1024.0 / size as f64), 4096, "within the margin");
    }

    #[test]
    fn comparisons_cost_little_and_become_rare() {
        let mut control = MicrobatchControl::new(4096);
        let played = sizes(&mut control, 5000, |size, _| size as f64);
        let tried = played.iter().filter(|size| **size != 4096).count();
        assert!((3..12).contains(&tried), "{tried} steps with another size");
        let seconds = |sizes: &[usize]| sizes.iter().map(|size| 1.0 / *size as f64).sum::<f64>();
        assert!(seconds(&played[..90]) < 1.06 * seconds(&[4096; 90]), "clearly slower sizes are tried once");
    }

    #[test]
    fn noise_does_not_choose_a_slow_size_and_drift_is_noticed() {
        let noisy =
            |size: usize, step: u64| (1.0 + 0.15 * noise(step)) * if size == 1024 { 1.2 } else { 1.0 };
        let mut control = MicrobatchControl::new(4096);
        let played = sizes(&mut control, 2000, noisy);
        let good = played.iter().filter(|size| **size == 1024).count();
        assert!(good > 1700, "{good} of 2000 steps had the fastest size");
        let later = sizes(&mut control, 8000, |size, _| size as f64);
        assert_eq!(later.last(), Some(&4096));
    }

    #[test]
    fn a_change_names_what_was_compared() {
        let mut control = MicrobatchControl::new(1024);
        let seconds = |size: usize| if size == 512 { 1.0 } else { 1.25 };
        let mut changes = Vec::new();
        for _ in 0..40 {
            let time = UpdateTime { tokens: 1000, seconds: seconds(control.tokens()) };
            changes.extend(control.observe(time));
            control.observe(UpdateTime::default());
        }
        let measured = [(1024, 800.0), (512, 1000.0), (256, 800.0)];
        assert_eq!(changes, [MicrobatchChange { before: 1024, after: 512, measured: measured.to_vec() }]);
    }
}
