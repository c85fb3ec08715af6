//! A micro-batch laid out for the network: one token stream without padding, every common prompt in it once.
//!
//! Invariant: rows and their targets keep the order in which they are given.

use std::ops::Range;

use model::{ANY_EXPERT, Config, Head, Pack, Target};
use trajectory::Sample;

use crate::plan::{prompt, row_tokens};

/// A micro-batch laid out for the network.
#[derive(Debug)]
pub struct Packed<'a> {
    /// The token stream.
    pub pack: Pack,
    /// Row of the pack that predicts each trained token.
    pub positions: Vec<usize>,
    /// The trained tokens, with the distributions that they were sampled from.
    pub targets: Vec<Target<'a>>,
    /// Number of trained tokens of each row, in order.
    pub trained: Vec<usize>,
}

impl Packed<'_> {
    /// Nothing.
    pub(crate) fn empty() -> Self {
        Self { pack: Pack::new(), positions: Vec::new(), targets: Vec::new(), trained: Vec::new() }
    }
}

/// Packs `rows`, which all have a trained token. The prompt of neighbours goes through the network once, where it is the
/// same. Tokens have the experts that their rows recorded, if those are `slots` for a token; 0 for a network that chooses itself.
#[must_use]
pub fn pack<'a>(rows: impl Iterator<Item = &'a Sample>, slots: usize) -> Packed<'a> {
    let mut packed = Packed::empty();
    let mut given = GivenRoutes { slots, experts: Vec::new(), any: false };
    let mut shared: Option<(&Sample, usize)> = None;
    for sample in rows {
        let prompt = prompt(sample);
        let prefix = match shared {
            Some((before, prefix)) if given.have_equal_prompts(before, sample) => prefix,
            // A trained token is never the first, so there is a prompt.
            _ => match packed.pack.push(prompt) {
                Ok(prefix) => {
                    given.push(sample, 0..prompt.len());
                    prefix
                }
                Err(_) => continue,
            },
        };
        shared = Some((sample, prefix));
        let rest = prompt.len()..row_tokens(sample);
        // Nothing is left of a row whose only trained token follows its prompt.
        let start = match packed.pack.push_continuation(prefix, &sample.token_ids()[rest.clone()]) {
            Ok(start) => {
                given.push(sample, rest);
                start
            }
            Err(_) => prefix + prompt.len(),
        };
        let before = packed.targets.len();
        for (t, token) in sample.token_ids().iter().enumerate().filter(|(t, _)| sample.loss_mask()[*t]) {
            let kept = sample.kept().map(|kept| kept.set(packed.targets.len() - before));
            let first = t == prompt.len();
            packed.positions.push(if first { prefix + t - 1 } else { start + t - 1 - prompt.len() });
            packed.targets.push(Target { token: *token, temperature: sample.temperature(), kept });
        }
        packed.trained.push(packed.targets.len() - before);
    }
    if given.any {
        packed.pack = packed.pack.routed(given.experts);
    }
    packed
}

/// Experts of a token in all layers of `model` that samples may have recorded: they are those of a policy, and no critic's.
pub(crate) fn recorded_slots(model: &Config) -> usize {
    if model.head == Head::Value { 0 } else { model.expert_slots() }
}

/// The experts that are given to the tokens of a pack.
struct GivenRoutes {
    /// Experts of a token in all layers.
    slots: usize,
    /// `[tokens, slots]`
    experts: Vec<u16>,
    /// Whether a row has recorded some.
    any: bool,
}

impl GivenRoutes {
    /// The experts of `tokens` of a row, if it has recorded them.
    fn of<'a>(&self, sample: &'a Sample, tokens: Range<usize>) -> Option<&'a [u16]> {
        let experts = sample.experts().filter(|_| self.slots > 0)?;
        let fits = experts.slots(sample.token_ids().len()) == self.slots;
        experts.ids.get(tokens.start * self.slots..tokens.end * self.slots).filter(|_| fits)
    }

    /// Adds the experts of `tokens` of a row.
    fn push(&mut self, sample: &Sample, tokens: Range<usize>) {
        match self.of(sample, tokens.clone()) {
            Some(experts) => {
                self.experts.extend_from_slice(experts);
                self.any = true;
            }
            None => self.experts.resize(self.experts.len() + tokens.len() * self.slots, ANY_EXPERT),
        }
    }

    /// Whether the prompts of two rows are the same, and so are their experts.
    fn have_equal_prompts(&self, a: &Sample, b: &Sample) -> bool {
        let tokens = 0..prompt(a).len();
        prompt(a) == prompt(b) && self.of(a, tokens.clone()) == self.of(b, tokens)
    }
}
