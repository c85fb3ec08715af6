//! Both edges of a run and the door for its workers, open before anything else is prepared: workers can join meanwhile, and
//! what they serve can be waited for.
//!
//! Invariant: it carries and does not look: groups by the buffer, versions by the hub, words of workers by the roster.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, OnceLock};
use std::time::{Duration, Instant, SystemTime};

use ::rewards::reward_model::ModelServer;
use buffer::http::Role;
use rollout::RolloutError;
use weights::Hub;

use crate::failure::Failure;
use crate::forward_edge::{Edge, Opening};
use crate::workers::roster::Roster;
use crate::workers::routes::Desk;

/// How often a run that waits for workers looks whether they have come.
const LOOK_UP: Duration = Duration::from_millis(50);

/// See the module.
pub(super) struct Exchange {
    /// For groups.
    pub(super) edge: Edge,
    /// For versions.
    pub(super) hub: Hub,
    /// Who takes part from other processes.
    pub(super) roster: Arc<Roster>,
    /// What they hear.
    pub(super) desk: Arc<Desk>,
}

impl Exchange {
    /// Opens everything; `recipe` is the file with every value spelled out.
    ///
    /// # Errors
    /// A buffer, address or token that cannot be used.
    pub(super) fn open(opening: &Opening<'_>, recipe: &Path) -> Result<Self, Failure> {
        let hub = Hub::new(opening.recipe.hub());
        let roster = Arc::new(Roster::after(now_ns()));
        let system = |source| Failure::System { what: format!("read {}", recipe.display()), source };
        let text = std::fs::read_to_string(recipe).map_err(system)?;
        let (model, ranks) = (OnceLock::new(), Mutex::new(None));
        let desk = Arc::new(Desk { roster: Arc::clone(&roster), recipe: text, model, ranks });
        let routes = vec![(Role::Writer, desk.router()), (Role::Writer, weights::http::router(hub.clone()))];
        let edge = opening.open(routes)?;
        let (buffer, seats) = (edge.own.clone(), hub.clone());
        roster.tell(move |name, instance| {
            // A buffer that has failed says so to whoever uses it next.
            buffer.iter().for_each(|buffer| drop(buffer.abandon(instance)));
            name.into_iter().for_each(|name| seats.forget(name));
        });
        Ok(Self { edge, hub, roster, desk })
    }

    /// Who serves the rewards `wanted`, as soon as all are served; what there is if `stop` is set before.
    ///
    /// # Errors
    /// One that is not served in time.
    pub(super) fn servers(
        &self,
        wanted: &[&str],
        wait: Duration,
        stop: &AtomicBool,
    ) -> Result<BTreeMap<String, ModelServer>, Failure> {
        let deadline = Instant::now() + wait;
        loop {
            let servers = self.roster.servers();
            let missing = wanted.iter().find(|name| !servers.contains_key(**name));
            let Some(missing) = missing.filter(|_| !stop.load(Ordering::Relaxed)) else { return Ok(servers) };
            if Instant::now() > deadline {
                return Err(RolloutError::Deadline {
                    who: "the run",
                    whom: format!("the process that serves reward `{missing}`; see its log"),
                    seconds: wait.as_secs_f64(),
                }
                .into());
            }
            std::thread::sleep(LOOK_UP);
        }
    }
}

/// Nanoseconds since 1970, by which instances of workers are counted on from one process of a run to the next.
fn now_ns() -> u64 {
    let since = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
    u64::try_from(since.as_nanos()).unwrap_or(0)
}
