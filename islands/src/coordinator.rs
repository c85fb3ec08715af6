//! The coordinator: outer weights, and the rounds in which islands exchange outer gradients.
//!
//! A round closes when all live islands have contributed, or at its deadline, which begins with the first contribution. The first
//! round also waits for the islands that are expected to begin together. Islands that
//! have not contributed by then are live no more, so that a dead island costs the others one deadline. An island is live from when it
//! joins, or contributes, until it leaves or misses a round. An outer gradient that comes after its round has closed is in no round:
//! its island takes the newest outer weights.
//!
//! Invariant: what was acknowledged is on disk. A contribution counts once, whatever is repeated. The mean of a round is a sum in
//! the order of the names of its islands. Outer weights change by the decoded outer update alone, which the islands also have; what
//! its compression loses is added to the next update (as DoubleSqueeze, Tang et al. 2019, arXiv 1905.05957).

use std::collections::{BTreeMap, VecDeque};
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};
use tokio::sync::watch;

use crate::IslandError;
use crate::compression::GradientCompression;
use crate::frame::{RoundMessage, to_bytes};
use crate::outer::{OuterOptimizer, mean};
use crate::store::{CoordinatorFiles, RUN_ID};
use crate::terms::{IslandTerms, is_name};

/// Closed rounds whose outer updates are kept, for islands that were restarted.
const RECENT: usize = 2;

/// Largest magnitude of a value of an outer gradient, far above that of any weight. The outer optimizer stays finite with it.
const MAX_MAGNITUDE: f32 = 1e18;

/// Settings of a coordinator.
#[derive(Clone, Debug, PartialEq)]
pub struct CoordinatorConfig {
    /// Directory of its files.
    pub dir: PathBuf,
    /// The outer optimizer.
    pub optimizer: OuterOptimizer,
    /// Longest time from the first contribution of a round to its close.
    pub deadline: Duration,
    /// Islands that the first round waits for, until its deadline.
    pub first_islands: usize,
    /// Most live islands.
    pub max_islands: usize,
    /// Most bytes of the outer weights.
    pub max_bytes: u64,
}

/// A request that the coordinator refuses.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CoordinatorRefusal {
    /// Status of HTTP.
    pub status: u16,
    /// Evidence and remedy.
    pub reason: String,
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
    /// Longest time from the first contribution of a round to its close, seconds.
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
    /// It is closed, with this outer update.
    Closed(RoundMessage),
    /// Its outer update is kept no more.
    Gone,
}

/// A coordinator.
#[derive(Debug)]
pub struct Coordinator {
    config: CoordinatorConfig,
    files: CoordinatorFiles,
    inner: Mutex<CoordinatorState>,
    /// The open round, for requests that wait for its end.
    rounds: watch::Sender<u64>,
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
    /// Id of the run, and outer gradient, of each island that has contributed to the open round.
    pub(crate) contributions: BTreeMap<String, (String, Vec<f32>)>,
    /// When the first of them came.
    pub(crate) first: Option<Instant>,
}

#[derive(Debug)]
pub(crate) struct ClosedRound {
    pub(crate) round: u64,
    pub(crate) islands: BTreeMap<String, String>,
    /// The outer update.
    pub(crate) payload: Arc<[u8]>,
}

impl CoordinatorRefusal {
    fn conflict(reason: impl Into<String>) -> Self {
        Self { status: 409, reason: reason.into() }
    }

    fn invalid(reason: impl Into<String>) -> Self {
        Self { status: 422, reason: reason.into() }
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
            // Files of a version that did not refuse them.
            outer.contributions.retain(|name, (_, values)| check_magnitudes(name, values).is_ok());
            // Time without a coordinator does not count.
            outer.first = (!outer.contributions.is_empty()).then(Instant::now);
        }
        let (rounds, _) = watch::channel(outer.as_ref().map_or(0, |outer| outer.round));
        let inner = Mutex::new(CoordinatorState { outer, failed: None });
        let coordinator = Self { config, files, inner, rounds };
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
            "contributed": outer.map(|outer| outer.contributions.keys().collect::<Vec<_>>()),
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
        let deadline_s = self.config.deadline.as_secs_f64();
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
        self.enter(outer, &name, &run)?;
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
            contributions: BTreeMap::new(),
            first: None,
        };
        let saved = self.files.save_members(&outer.members).and_then(|()| self.files.save(&outer));
        saved.map_err(|error| unwritten(&error))?;
        inner.outer = Some(outer);
        Ok(())
    }

    /// The newest outer weights.
    ///
    /// # Errors
    /// There are none yet.
    pub fn weights(&self) -> Result<RoundMessage, CoordinatorRefusal> {
        let inner = self.state()?;
        let outer = begun(inner.outer.as_ref())?;
        let (round, islands) = (outer.round, outer.members.len() as u64);
        Ok(RoundMessage { round, islands, payload: to_bytes(&outer.weights) })
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
        let mut inner = self.state()?;
        let outer = begun_mut(inner.outer.as_mut())?;
        let RoundMessage { round, payload, .. } = message;
        if *round > outer.round {
            return Err(CoordinatorRefusal::conflict(format!(
                "it is at round {round}, and round {} is open here; restore the directory of the coordinator",
                outer.round
            )));
        }
        let fragment = outer.terms.fragment(*round);
        let values = outer.terms.compression.decode(payload, fragment.len());
        let values = values.map_err(|error| CoordinatorRefusal::invalid(error.to_string()))?;
        check_magnitudes(name, &values)?;
        if *round < outer.round {
            let mut closed = outer.recent.iter();
            let is_in = closed
                .any(|closed| closed.round == *round && closed.islands.get(name).is_some_and(|of| of == run));
            self.enter(outer, name, run)?;
            return Ok(if is_in { ContributionOutcome::Counted } else { ContributionOutcome::Late });
        }
        self.enter(outer, name, run)?;
        if let Some((of, _)) = outer.contributions.get(name) {
            if of != run {
                return Err(name_taken(name));
            }
            return Ok(ContributionOutcome::Counted);
        }
        let saved = self.files.save_contribution(*round, name, run, payload);
        saved.map_err(|error| unwritten(&error))?;
        outer.contributions.insert(name.to_owned(), (run.to_owned(), values));
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
        let message = |closed: &ClosedRound| RoundMessage {
            round,
            islands: closed.islands.len() as u64,
            payload: closed.payload.to_vec(),
        };
        let closed = outer.recent.iter().find(|closed| closed.round == round);
        Ok(closed.map_or(RoundAnswer::Gone, |closed| RoundAnswer::Closed(message(closed))))
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
        self.files.save_members(&outer.members).map_err(|error| unwritten(&error))?;
        if self.is_complete(outer) {
            self.close(&mut inner)?;
        }
        Ok(())
    }

    /// Closes the open round if its deadline is over.
    ///
    /// # Errors
    /// The files cannot be written.
    pub fn close_if_due(&self) -> Result<(), CoordinatorRefusal> {
        let mut inner = self.state()?;
        let first = inner.outer.as_ref().and_then(|outer| outer.first);
        if first.is_none_or(|first| first.elapsed() < self.config.deadline) {
            return Ok(());
        }
        self.close(&mut inner)
    }

    fn state(&self) -> Result<MutexGuard<'_, CoordinatorState>, CoordinatorRefusal> {
        let inner = self.inner.lock().unwrap_or_else(PoisonError::into_inner);
        match &inner.failed {
            Some(reason) => Err(CoordinatorRefusal { status: 503, reason: reason.clone() }),
            None => Ok(inner),
        }
    }

    /// Makes an island live.
    fn enter(&self, outer: &mut OuterState, name: &str, run: &str) -> Result<(), CoordinatorRefusal> {
        match outer.members.get(name) {
            Some(of) if of == run => return Ok(()),
            Some(_) => return Err(name_taken(name)),
            None => {}
        }
        let (live, most) = (outer.members.len(), self.config.max_islands);
        if live >= most {
            let reason = format!("{live} islands are live, at most {most} may be; raise `--max-islands`");
            return Err(CoordinatorRefusal { status: 409, reason });
        }
        let mut members = outer.members.clone();
        members.insert(name.to_owned(), run.to_owned());
        self.files.save_members(&members).map_err(|error| unwritten(&error))?;
        outer.members = members;
        Ok(())
    }

    /// Whether all islands that the open round waits for have contributed to it.
    fn is_complete(&self, outer: &OuterState) -> bool {
        let expected = if outer.round == 0 { self.config.first_islands } else { 1 };
        let contributions = &outer.contributions;
        contributions.len() >= expected.max(1)
            && outer.members.keys().all(|name| contributions.contains_key(name))
    }

    /// Closes the open round with the contributions that it has.
    fn close(&self, inner: &mut CoordinatorState) -> Result<(), CoordinatorRefusal> {
        let Some(outer) = inner.outer.as_mut() else { return Ok(()) };
        let (round, fragment) = (outer.round, outer.terms.fragment(outer.round));
        let contributions = std::mem::take(&mut outer.contributions);
        outer.first = None;
        let (islands, values): (BTreeMap<_, _>, Vec<_>) = {
            let named = contributions.into_iter().map(|(name, (run, values))| ((name, run), values));
            let (names, values): (Vec<_>, Vec<_>) = named.unzip();
            (names.into_iter().collect(), values)
        };
        let update = self.config.optimizer.update(&mean(&values), &mut outer.momentum[fragment.clone()]);
        let encoded = outer.terms.compression.encode_with(&update, &mut outer.residual[fragment.clone()]);
        let (payload, applied) = match encoded {
            Ok(encoded) => encoded,
            Err(error) => {
                inner.failed = Some(error.to_string());
                return Err(CoordinatorRefusal { status: 503, reason: error.to_string() });
            }
        };
        for (weight, applied) in outer.weights[fragment].iter_mut().zip(applied) {
            *weight -= applied;
        }
        // Those that have not contributed are late or dead.
        outer.members.retain(|name, _| islands.contains_key(name));
        outer.recent.push_back(ClosedRound { round, islands, payload: payload.into() });
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

fn check_names(name: &str, run: &str) -> Result<(), CoordinatorRefusal> {
    if !is_name(name) {
        let reason = "names of islands are 1 to 64 letters, digits, `.`, `_` and `-`, without a dot first";
        return Err(CoordinatorRefusal::invalid(format!("`{}`: {reason}", name.escape_debug())));
    }
    if run.len() != RUN_ID || !run.bytes().all(|byte| byte.is_ascii_hexdigit()) {
        return Err(CoordinatorRefusal::invalid("the id of the run is not 32 hexadecimal digits"));
    }
    Ok(())
}

/// Refuses an outer gradient that would make the outer weights infinite, which no later round could mend.
fn check_magnitudes(name: &str, values: &[f32]) -> Result<(), CoordinatorRefusal> {
    let Some(index) = values.iter().position(|value| value.abs() > MAX_MAGNITUDE) else { return Ok(()) };
    Err(CoordinatorRefusal::invalid(format!(
        "value {index} of the outer gradient of island `{name}` is {:e}, and at most {MAX_MAGNITUDE:e} is taken; lower its \
         learning rate, or resume it from an earlier checkpoint",
        values[index]
    )))
}

fn check_terms(ours: &IslandTerms, theirs: &IslandTerms) -> Result<(), CoordinatorRefusal> {
    let differences = ours.differences(theirs);
    if differences.is_empty() {
        return Ok(());
    }
    let reason = format!("it has {}; islands that exchange must agree on these", differences.join("; "));
    Err(CoordinatorRefusal::conflict(reason))
}

/// The refusal of a request whose files cannot be written now. It can be repeated.
fn unwritten(error: &IslandError) -> CoordinatorRefusal {
    CoordinatorRefusal { status: 503, reason: error.to_string() }
}

fn name_taken(name: &str) -> CoordinatorRefusal {
    CoordinatorRefusal::conflict(format!(
        "another run is live under the name `{name}`; choose another `island.name`, or wait until that run has missed a round"
    ))
}

fn begun(outer: Option<&OuterState>) -> Result<&OuterState, CoordinatorRefusal> {
    outer.ok_or_else(|| CoordinatorRefusal::conflict("no island has joined yet"))
}

fn begun_mut(outer: Option<&mut OuterState>) -> Result<&mut OuterState, CoordinatorRefusal> {
    outer.ok_or_else(|| CoordinatorRefusal::conflict("no island has joined yet"))
}
