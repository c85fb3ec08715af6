//! The coordinator: outer weights, and the rounds in which islands exchange outer gradients.
//!
//! A round closes when all islands that it waits for have contributed, or at its deadline, which begins with the first contribution.
//! An outer gradient that is being received then keeps it open for a while longer. The first round also waits for the islands that
//! are expected to begin together. Islands that have not contributed by then are live no more, so that a dead island costs the
//! others one deadline. An island is live from when it joins, or contributes, until it leaves or misses a round; rounds wait for it
//! from its first contribution on. An outer gradient that comes after its round has closed is in no round: its island takes the
//! newest outer weights.
//!
//! Invariant: what was acknowledged is on disk. A contribution counts once, whatever is repeated. The mean of a round is a sum in
//! the order of the names of its islands. Outer weights change by the decoded outer update alone, which the islands also have; what
//! its compression loses is added to the next update (as DoubleSqueeze, Tang et al. 2019, arXiv 1905.05957). Outer gradients of the
//! open round are on disk alone, and its mean reads one at a time.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::path::PathBuf;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use axum::body::Bytes;
use serde::{Deserialize, Serialize};
use tokio::sync::watch;

use crate::IslandError;
use crate::compression::GradientCompression;
use crate::frame::{RoundMessage, to_bytes, weights_digest};
use crate::outer::{GradientSum, OuterOptimizer};
use crate::refusal::{CoordinatorRefusal, check_magnitudes, check_names, check_terms};
use crate::store::{CoordinatorFiles, RUN_ID};
use crate::terms::IslandTerms;

/// Closed rounds whose outer updates are kept, for islands that were restarted.
const RECENT: usize = 2;

/// Longest time after its deadline that a round is open for outer gradients that are being received.
const UPLOAD: Duration = Duration::from_secs(240);

/// Name of an island and id of its run.
pub(crate) type Contributor = (String, String);

/// Settings of a coordinator.
#[derive(Clone, Debug, PartialEq)]
pub struct CoordinatorConfig {
    /// Directory of its files.
    pub dir: PathBuf,
    /// The outer optimizer.
    pub optimizer: OuterOptimizer,
    /// Longest time from the first contribution of a round to its close, without outer gradients that are being received then.
    pub deadline: Duration,
    /// Islands that the first round waits for, until its deadline.
    pub first_islands: usize,
    /// Most live islands.
    pub max_islands: usize,
    /// Most bytes of the outer weights.
    pub max_bytes: u64,
}

/// What an island says as it joins.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct IslandJoin {
    /// Its name.
    pub name: String,
    /// The id of its run, 32 hexadecimal digits.
    pub run: String,
    /// What it must have in common with the other islands.
    pub terms: IslandTerms,
    /// The coordinator and the round of its state, if it has been here before.
    pub state: Option<JoinedState>,
}

/// Where the state of an island comes from.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct JoinedState {
    /// Id of the coordinator.
    pub coordinator: String,
    /// The round that comes next for the island.
    pub round: u64,
}

/// The answer to an island that joins.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct JoinAnswer {
    /// Id of the coordinator; empty if it has no weights yet and expects those of this island.
    pub coordinator: String,
    /// The open round.
    pub round: u64,
    /// Live islands, this one too.
    pub islands: u64,
    /// Longest time from the first contribution of a round to its close, with outer gradients that are being received, seconds.
    pub deadline_s: f64,
}

/// What became of a contribution.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ContributionOutcome {
    /// It is in the round, from this request or an earlier one.
    Counted,
    /// The round was closed without it.
    Late,
}

/// What a round has come to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum RoundAnswer {
    /// It is open.
    Open,
    /// It is closed: the frame of its outer update, and of the digest of the outer weights of its fragment after that.
    Closed(Bytes),
    /// Its outer update is kept no more.
    Gone,
}

/// A coordinator.
#[derive(Debug)]
pub struct Coordinator {
    config: CoordinatorConfig,
    files: CoordinatorFiles,
    inner: Mutex<CoordinatorState>,
    /// Outer gradients that are being received, one entry for each request.
    coming: Mutex<Vec<Contributor>>,
    /// The open round, for requests that wait for its end.
    rounds: watch::Sender<u64>,
}

/// A request with an outer gradient, whose round waits for it within a bound until this is dropped.
#[derive(Debug)]
#[must_use = "the outer gradient is expected until this is dropped"]
pub struct ExpectedGradient<'a> {
    coming: &'a Mutex<Vec<Contributor>>,
    contributor: Contributor,
}

#[derive(Debug)]
struct CoordinatorState {
    /// `None` until the first island has sent its weights.
    outer: Option<OuterState>,
    /// Why the files cannot be written any more.
    failed: Option<String>,
}

/// State of the outer optimization.
#[derive(Debug)]
pub(crate) struct OuterState {
    pub(crate) id: String,
    pub(crate) terms: IslandTerms,
    pub(crate) round: u64,
    pub(crate) weights: Vec<f32>,
    pub(crate) momentum: Vec<f32>,
    pub(crate) residual: Vec<f32>,
    pub(crate) recent: VecDeque<ClosedRound>,
    /// Live islands and the ids of their runs.
    pub(crate) members: BTreeMap<String, String>,
    /// Names of live islands that have not contributed since they joined: rounds do not wait for them.
    pub(crate) joined: BTreeSet<String>,
    /// Islands whose outer gradients of the open round are on disk.
    pub(crate) contributions: BTreeSet<Contributor>,
    /// The last round of each run that has contributed to one, by its id.
    pub(crate) counted: BTreeMap<String, u64>,
    /// When the first contribution of the open round came.
    pub(crate) first: Option<Instant>,
    /// The frame of the outer weights, once an island has asked for it.
    pub(crate) frame: Option<Bytes>,
}

#[derive(Debug)]
pub(crate) struct ClosedRound {
    pub(crate) round: u64,
    pub(crate) islands: BTreeSet<Contributor>,
    /// The frame of the outer update, and of the digest of the outer weights of its fragment after that.
    pub(crate) frame: Bytes,
}

impl Drop for ExpectedGradient<'_> {
    fn drop(&mut self) {
        let mut coming = self.coming.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(index) = coming.iter().position(|of| *of == self.contributor) {
            coming.swap_remove(index);
        }
    }
}

impl Coordinator {
    /// Opens the directory of `config`, and continues from the files there.
    ///
    /// # Errors
    /// A directory that another coordinator has open, or damaged files.
    pub fn open(config: CoordinatorConfig) -> Result<Self, IslandError> {
        let files = CoordinatorFiles::open(&config.dir)?;
        let mut outer = files.load()?;
        if let Some(outer) = &mut outer {
            // Time without a coordinator does not count.
            outer.first = (!outer.contributions.is_empty()).then(Instant::now);
        }
        let (rounds, _) = watch::channel(outer.as_ref().map_or(0, |outer| outer.round));
        let inner = Mutex::new(CoordinatorState { outer, failed: None });
        let coordinator = Self { config, files, inner, coming: Mutex::default(), rounds };
        // A crash may have come between the last contribution and the close. A failure is the answer to every later request.
        if let Ok(mut inner) = coordinator.state()
            && inner.outer.as_ref().is_some_and(|outer| coordinator.is_complete(outer))
        {
            let _ = coordinator.close(&mut inner);
        }
        Ok(coordinator)
    }

    /// The open round, which changes as rounds close.
    #[must_use]
    pub fn rounds(&self) -> watch::Receiver<u64> {
        self.rounds.subscribe()
    }

    /// Longest body that a request may have, bytes.
    #[must_use]
    pub fn max_bytes(&self) -> u64 {
        self.config.max_bytes
    }

    /// The open round and the live islands.
    #[must_use]
    pub fn status(&self) -> serde_json::Value {
        let inner = self.inner.lock().unwrap_or_else(PoisonError::into_inner);
        let outer = inner.outer.as_ref();
        serde_json::json!({
            "round": outer.map(|outer| outer.round),
            "islands": outer.map(|outer| outer.members.keys().collect::<Vec<_>>()),
            "contributed": outer.map(|outer| outer.contributions.iter().map(|(name, _)| name).collect::<Vec<_>>()),
            "terms": outer.map(|outer| &outer.terms),
            "failed": inner.failed,
        })
    }

    /// An island joins, or comes back.
    ///
    /// # Errors
    /// Another model or other terms, a name that a live island has, a state of another coordinator, too many islands.
    pub fn join(&self, request: IslandJoin) -> Result<JoinAnswer, CoordinatorRefusal> {
        let IslandJoin { name, run, terms, state } = request;
        check_names(&name, &run)?;
        if let Some(fault) = terms.fault(self.config.max_bytes / 4) {
            return Err(CoordinatorRefusal::invalid(fault));
        }
        let mut inner = self.state()?;
        let deadline_s = (self.config.deadline + UPLOAD).as_secs_f64();
        let Some(outer) = &mut inner.outer else {
            if state.is_some() {
                let reason = "its checkpoint has rounds of another coordinator, and this one has none; restore the directory of \
                              the coordinator, or start a new run from the model of the checkpoint";
                return Err(CoordinatorRefusal::conflict(reason));
            }
            return Ok(JoinAnswer { coordinator: String::new(), round: 0, islands: 1, deadline_s });
        };
        check_terms(&outer.terms, &terms)?;
        if let Some(state) = state.filter(|state| state.coordinator != outer.id || state.round > outer.round)
        {
            return Err(CoordinatorRefusal::conflict(format!(
                "its checkpoint is at round {} of coordinator {}, this is coordinator {} at round {}; restore the directory of \
                 the coordinator, or start a new run from the model of the checkpoint",
                state.round, state.coordinator, outer.id, outer.round
            )));
        }
        if self.enter(outer, &name, &run)? {
            outer.joined.insert(name);
        }
        let (coordinator, round, islands) = (outer.id.clone(), outer.round, outer.members.len() as u64);
        Ok(JoinAnswer { coordinator, round, islands, deadline_s })
    }

    /// The weights `values`, `[trained values]` in f32, of the first island become the outer weights.
    ///
    /// # Errors
    /// There are outer weights already (status 412), or they are not those of `terms`.
    pub fn begin(
        &self,
        name: &str,
        run: &str,
        terms: IslandTerms,
        values: &[u8],
    ) -> Result<(), CoordinatorRefusal> {
        check_names(name, run)?;
        if let Some(fault) = terms.fault(self.config.max_bytes / 4) {
            return Err(CoordinatorRefusal::invalid(fault));
        }
        let mut inner = self.state()?;
        if inner.outer.is_some() {
            let reason = "there are outer weights already; join again".to_owned();
            return Err(CoordinatorRefusal { status: 412, reason });
        }
        let weights = GradientCompression::None.decode(values, terms.values());
        let weights = weights.map_err(|error| CoordinatorRefusal::invalid(error.to_string()))?;
        let count = weights.len();
        let outer = OuterState {
            id: new_id(),
            terms,
            round: 0,
            weights,
            momentum: vec![0.0; count],
            residual: vec![0.0; count],
            recent: VecDeque::new(),
            members: BTreeMap::from([(name.to_owned(), run.to_owned())]),
            joined: BTreeSet::new(),
            contributions: BTreeSet::new(),
            counted: BTreeMap::new(),
            first: None,
            frame: None,
        };
        let saved = self.files.save_members(&outer.members).and_then(|()| self.files.save(&outer));
        saved.map_err(|error| CoordinatorRefusal::unwritten(&error))?;
        inner.outer = Some(outer);
        Ok(())
    }

    /// The frame of the newest outer weights.
    ///
    /// # Errors
    /// There are none yet.
    pub fn weights(&self) -> Result<Bytes, CoordinatorRefusal> {
        let mut inner = self.state()?;
        let OuterState { round, weights, recent, frame, .. } = begun_mut(inner.outer.as_mut())?;
        let islands = recent.back().map_or(1, |closed| closed.islands.len() as u64);
        let frame = frame.get_or_insert_with(|| {
            RoundMessage { round: *round, islands, payload: to_bytes(weights) }.to_frame().into()
        });
        Ok(frame.clone())
    }

    /// The island `name` begins to send an outer gradient. The open round waits for it, within a bound, until the result is dropped.
    pub fn expect(&self, name: &str, run: &str) -> ExpectedGradient<'_> {
        let contributor = (name.to_owned(), run.to_owned());
        self.coming.lock().unwrap_or_else(PoisonError::into_inner).push(contributor.clone());
        ExpectedGradient { coming: &self.coming, contributor }
    }

    /// The outer gradient of an island. It is on disk when this returns.
    ///
    /// # Errors
    /// A round that is not open yet, values that are not those of its fragment or are too large, a name that another live island
    /// has.
    pub fn contribute(
        &self,
        name: &str,
        run: &str,
        message: &RoundMessage,
    ) -> Result<ContributionOutcome, CoordinatorRefusal> {
        check_names(name, run)?;
        let unwritten = |error: IslandError| CoordinatorRefusal::unwritten(&error);
        let RoundMessage { round, payload, .. } = message;
        let (open, terms) = {
            let inner = self.state()?;
            let outer = begun(inner.outer.as_ref())?;
            (outer.round, outer.terms.clone())
        };
        if *round > open {
            return Err(CoordinatorRefusal::conflict(format!(
                "it is at round {round}, and round {open} is open here; restore the directory of the coordinator"
            )));
        }
        // Without the lock: both take long, and other requests need not wait for them.
        let values = terms.compression.decode(payload, terms.fragment(*round).len());
        check_magnitudes(name, &values.map_err(|error| CoordinatorRefusal::invalid(error.to_string()))?)?;
        let contributor = (name.to_owned(), run.to_owned());
        let staged = (*round == open)
            .then(|| self.files.stage_contribution(*round, &contributor, payload).map_err(unwritten))
            .transpose()?;
        let mut inner = self.state()?;
        let outer = begun_mut(inner.outer.as_mut())?;
        self.enter(outer, name, run)?;
        outer.joined.remove(name);
        let Some(staged) = staged.filter(|_| *round == outer.round) else {
            let is_in = match outer.recent.iter().find(|closed| closed.round == *round) {
                Some(closed) => closed.islands.contains(&contributor),
                // An island takes its rounds in their order, and goes back only with a resume, which sends what it sent before.
                None => outer.counted.get(run).is_some_and(|last| last >= round),
            };
            return Ok(if is_in { ContributionOutcome::Counted } else { ContributionOutcome::Late });
        };
        if outer.contributions.contains(&contributor) {
            return Ok(ContributionOutcome::Counted);
        }
        self.files.admit(&staged).map_err(unwritten)?;
        outer.contributions.insert(contributor);
        outer.first.get_or_insert_with(Instant::now);
        if self.is_complete(outer) {
            self.close(&mut inner)?;
        }
        Ok(ContributionOutcome::Counted)
    }

    /// What round `round` has come to.
    ///
    /// # Errors
    /// There are no outer weights yet.
    pub fn round(&self, round: u64) -> Result<RoundAnswer, CoordinatorRefusal> {
        let inner = self.state()?;
        let outer = begun(inner.outer.as_ref())?;
        if round >= outer.round {
            return Ok(RoundAnswer::Open);
        }
        let closed = outer.recent.iter().find(|closed| closed.round == round);
        Ok(closed.map_or(RoundAnswer::Gone, |closed| RoundAnswer::Closed(closed.frame.clone())))
    }

    /// An island leaves. What it has contributed stays in the round.
    ///
    /// # Errors
    /// The files cannot be written.
    pub fn leave(&self, name: &str, run: &str) -> Result<(), CoordinatorRefusal> {
        let mut inner = self.state()?;
        let Some(outer) = inner.outer.as_mut() else { return Ok(()) };
        if outer.members.get(name).is_none_or(|of| of != run) {
            return Ok(());
        }
        outer.members.remove(name);
        outer.joined.remove(name);
        let saved = self.files.save_members(&outer.members);
        saved.map_err(|error| CoordinatorRefusal::unwritten(&error))?;
        if self.is_complete(outer) {
            self.close(&mut inner)?;
        }
        Ok(())
    }

    /// Closes the open round if its deadline is over, or if it waited only for requests that have ended without an outer gradient.
    ///
    /// # Errors
    /// The files cannot be written.
    pub fn close_if_due(&self) -> Result<(), CoordinatorRefusal> {
        let mut inner = self.state()?;
        let is_due = inner.outer.as_ref().is_some_and(|outer| self.is_complete(outer) || self.is_due(outer));
        if is_due { self.close(&mut inner) } else { Ok(()) }
    }

    fn state(&self) -> Result<MutexGuard<'_, CoordinatorState>, CoordinatorRefusal> {
        let inner = self.inner.lock().unwrap_or_else(PoisonError::into_inner);
        match &inner.failed {
            Some(reason) => Err(CoordinatorRefusal { status: 503, reason: reason.clone() }),
            None => Ok(inner),
        }
    }

    /// Makes an island live. Whether it was not.
    fn enter(&self, outer: &mut OuterState, name: &str, run: &str) -> Result<bool, CoordinatorRefusal> {
        match outer.members.get(name) {
            Some(of) if of == run => return Ok(false),
            Some(_) => return Err(CoordinatorRefusal::name_taken(name)),
            None => {}
        }
        let (live, most) = (outer.members.len(), self.config.max_islands);
        if live >= most {
            let reason = format!("{live} islands are live, at most {most} may be; raise `--max-islands`");
            return Err(CoordinatorRefusal::conflict(reason));
        }
        let mut members = outer.members.clone();
        members.insert(name.to_owned(), run.to_owned());
        self.files.save_members(&members).map_err(|error| CoordinatorRefusal::unwritten(&error))?;
        outer.members = members;
        Ok(true)
    }

    /// Whether all islands that the open round waits for have contributed to it, and no other live one is about to.
    fn is_complete(&self, outer: &OuterState) -> bool {
        let expected = if outer.round == 0 { self.config.first_islands } else { 1 };
        let OuterState { members, joined, contributions, .. } = outer;
        contributions.len() >= expected.max(1)
            && members.iter().all(|(name, run)| {
                joined.contains(name) || contributions.contains(&(name.clone(), run.clone()))
            })
            && !self.receives(outer)
    }

    /// Whether the deadline of the open round is over.
    fn is_due(&self, outer: &OuterState) -> bool {
        let Some(waited) = outer.first.map(|first| first.elapsed()) else { return false };
        let deadline = self.config.deadline;
        waited >= deadline && (waited >= deadline + UPLOAD || !self.receives(outer))
    }

    /// Whether an outer gradient of a live island is being received that the open round does not have yet.
    fn receives(&self, outer: &OuterState) -> bool {
        let coming = self.coming.lock().unwrap_or_else(PoisonError::into_inner);
        let is_missing =
            |of: &Contributor| outer.members.get(&of.0) == Some(&of.1) && !outer.contributions.contains(of);
        coming.iter().any(is_missing)
    }

    /// The mean of the outer gradients of the open round, `[values of its fragment]`.
    fn mean(&self, outer: &OuterState) -> Result<Vec<f32>, IslandError> {
        let len = outer.terms.fragment(outer.round).len();
        let mut sum = GradientSum::new(len);
        for contributor in &outer.contributions {
            let bytes = self.files.contribution(outer.round, contributor)?;
            sum.add(&outer.terms.compression.decode(&bytes, len)?);
        }
        Ok(sum.mean())
    }

    /// Closes the open round with the contributions that it has.
    fn close(&self, inner: &mut CoordinatorState) -> Result<(), CoordinatorRefusal> {
        let Some(outer) = inner.outer.as_mut() else { return Ok(()) };
        let (round, fragment) = (outer.round, outer.terms.fragment(outer.round));
        let encoded = self.mean(outer).and_then(|mean| {
            let update = self.config.optimizer.update(&mean, &mut outer.momentum[fragment.clone()]);
            outer.terms.compression.encode_with(&update, &mut outer.residual[fragment.clone()])
        });
        let (mut payload, applied) = match encoded {
            Ok(encoded) => encoded,
            Err(error) => {
                inner.failed = Some(error.to_string());
                return Err(CoordinatorRefusal::unwritten(&error));
            }
        };
        for (weight, applied) in outer.weights[fragment.clone()].iter_mut().zip(applied) {
            *weight -= applied;
        }
        payload.extend(weights_digest(&outer.weights[fragment]));
        let islands = std::mem::take(&mut outer.contributions);
        outer.counted.extend(islands.iter().map(|(_, run)| (run.clone(), round)));
        (outer.first, outer.frame) = (None, None);
        outer.joined.clear();
        // Those that have not contributed are late or dead.
        outer.members.retain(|name, run| islands.contains(&(name.clone(), run.clone())));
        let frame = RoundMessage { round, islands: islands.len() as u64, payload }.to_frame().into();
        outer.recent.push_back(ClosedRound { round, islands, frame });
        while outer.recent.len() > RECENT {
            outer.recent.pop_front();
        }
        outer.round += 1;
        let saved = self.files.save_members(&outer.members).and_then(|()| self.files.save(outer));
        let open = outer.round;
        if let Err(error) = saved {
            // What is in memory is ahead of the files, so no request may be answered from it.
            inner.failed = Some(format!("{error}; restart the coordinator"));
            return Err(CoordinatorRefusal { status: 503, reason: error.to_string() });
        }
        self.rounds.send_replace(open);
        Ok(())
    }
}

/// An id of a run or of a coordinator: 32 hexadecimal digits from the random source of the system.
#[must_use]
pub fn new_id() -> String {
    let mut bytes = [0_u8; RUN_ID / 2];
    // Without a random source ids are equal, and two runs of one name are taken for one.
    let _ = getrandom::fill(&mut bytes);
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn begun(outer: Option<&OuterState>) -> Result<&OuterState, CoordinatorRefusal> {
    outer.ok_or_else(|| CoordinatorRefusal::conflict("no island has joined yet"))
}

fn begun_mut(outer: Option<&mut OuterState>) -> Result<&mut OuterState, CoordinatorRefusal> {
    outer.ok_or_else(|| CoordinatorRefusal::conflict("no island has joined yet"))
}
