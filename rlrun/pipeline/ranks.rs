//! The ranks of a trainer that are processes: where they meet at the start of a run and, if they may come and go, during it.
//!
//! Invariant: the first rank is this process. The others show that they know the token of the run before they are ranks.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use collective::tcp::{Listener, Meeting};
use trainer::trainer::elastic::{Elasticity, RankMeeting};
use trainer::{Leader, TrainerError};

use super::Run;
use crate::failure::Failure;
use crate::recipe::Recipe;
use crate::report::Report;
use crate::run_buffer::BufferServer;
use crate::workers::api::WorkerApi;
use crate::workers::membership::{derived, token};
use crate::workers::trainer::MEETING;

/// The ranks of a run that may come and go.
#[derive(Debug)]
struct RunRanks {
    meeting: Meeting,
    /// Numbers of ranks that can train together, the largest first.
    worlds: Vec<usize>,
    patience: Duration,
    wait: Duration,
    report: Arc<Report>,
}

impl Run<'_> {
    /// Waits until all other ranks of the trainer have joined. Returns also how training continues without some of them, if it does.
    pub(super) fn wait_for_ranks(
        &self,
        api: &WorkerApi,
        server: &BufferServer,
    ) -> Result<(Arc<Leader>, Option<Elasticity>), Failure> {
        let own = server.token_file.as_deref().map(|file| token(file, "writer")).transpose()?;
        let known = self.listener.as_ref().map(|listener| listener.token.as_str()).or(own.as_deref());
        let secret = derived(known, MEETING).unwrap_or_default();
        let address = SocketAddr::new(server.address.ip(), 0);
        let (world, wait) = (self.recipe.trainer.world, self.recipe.wait());
        let waiting = || self.report.note(&format!("waiting for {} more ranks of the trainer", world - 1));
        if let Some(worlds) = worlds(self.recipe) {
            let meeting = Meeting::open(address, secret.as_bytes()).map_err(TrainerError::from)?;
            api.set_rank_port(Some(meeting.local_addr().port()));
            waiting();
            let collective = meeting.group(&[world], wait, wait).map_err(TrainerError::from)?;
            let snapshot_every = self.recipe.trainer.elastic.snapshot_every;
            let patience = Duration::try_from_secs_f64(self.recipe.trainer.elastic.patience_s);
            let patience = patience.unwrap_or(wait).min(wait);
            let report = Arc::clone(&self.report);
            let ranks = RunRanks { meeting, worlds, patience, wait, report };
            let elasticity = Elasticity { meeting: Box::new(ranks), snapshot_every };
            return Ok((Leader::new(Arc::new(collective)), Some(elasticity)));
        }
        let listener = Listener::bind(address, secret.as_bytes()).map_err(TrainerError::from)?;
        let system = |source| Failure::System { what: "read the address for ranks".to_owned(), source };
        let port = listener.local_addr().map_err(system)?.port();
        api.set_rank_port(Some(port));
        waiting();
        let collective = listener.accept(world, wait).map_err(TrainerError::from)?;
        // A rank that is started again waits until this process is started again too.
        api.set_rank_port(None);
        Ok((Leader::new(Arc::new(collective)), None))
    }
}

/// Numbers of ranks that can train together, the largest first; `None` if ranks may not come and go. Smaller ones are powers of
/// two, which give the same bits.
fn worlds(recipe: &Recipe) -> Option<Vec<usize>> {
    let (world, elastic) = (recipe.trainer.world, recipe.trainer.elastic);
    let powers = (0..usize::BITS).rev().map(|power| 1_usize << power).filter(|power| *power < world);
    let allowed = [world].into_iter().chain(powers).filter(|ranks| *ranks >= elastic.min_world);
    (elastic.snapshot_every > 0).then(|| allowed.collect())
}

impl RankMeeting for RunRanks {
    fn possible(&self, world: usize) -> usize {
        let all = world + self.meeting.waiting();
        self.worlds.iter().copied().find(|ranks| *ranks <= all).unwrap_or(0)
    }

    fn meet(&self, most: usize) -> Result<Arc<Leader>, TrainerError> {
        let worlds: Vec<usize> = self.worlds.iter().copied().filter(|ranks| *ranks <= most).collect();
        let first = worlds.first().copied().unwrap_or_default();
        let patience = self.patience.as_secs_f64();
        self.report.note(&format!("waiting up to {patience:.0} s for {first} ranks of the trainer"));
        Ok(Leader::new(Arc::new(self.meeting.group(&worlds, self.patience, self.wait)?)))
    }
}
