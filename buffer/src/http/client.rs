//! The client: the two contracts over HTTP, blocking.
//!
//! Invariant: a call returns what the buffer itself would have returned, or names the request that failed. A request
//! is repeated only if the repetition is idempotent, and only until a deadline.
//!
//! Most requests are idempotent. Three are not: if the answer of an `admit`, an `abort` or a lease without a named
//! step is lost, the call fails as [`BufferError::Unclear`], unless the request was certainly not sent. What such a
//! request took is free again when its hold expires.

mod call;
mod renewal;

use std::fmt;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::{Duration, Instant};

use serde::Serialize;
use serde::de::DeserializeOwned;
use trajectory::{Group, GroupId, PolicyVersion};

use self::call::{ClientCall, ClientCore, ClientResponse, RetryPolicy};
use self::renewal::LeaseRenewal;
use super::problem::Evidence;
use super::wire::{
    AbandonRequest, AbandonedBody, AbortRequest, AckThroughRequest, AdmissionsAnswer, AdmissionsRequest,
    AppendAnswer, ClaimRequest, EmptyAnswer, EmptyRequest, ExtendRequest, GroupView, ItemLimits, ItemResult,
    ItemStatus, LeaseAnswer, LeaseBody, LeasesRequest, MAX_WAIT_MS, QuarantinedBody, StatsBody,
    SubmissionsView, VersionRequest, milliseconds,
};
use crate::{
    AdmitRequest, BufferError, Consumer, Finalized, Lease, LeaseId, LeaseRequest, Producer, Stats, Submitted,
};

/// Maximum length of an idempotency key, bytes.
const MAX_KEY: usize = 128;

/// Address of a served buffer, and how to use it.
#[derive(Clone)]
pub struct ClientConfig {
    /// Such as `http://127.0.0.1:8700`.
    pub url: String,
    /// A token of the server's token file, without the role.
    pub token: Option<String>,
    /// PEM file with the TLS roots to trust instead of those of browsers.
    pub roots: Option<PathBuf>,
    /// How long a request is repeated while the server is unreachable or asks to retry, beside its own wait.
    pub patience: Duration,
    /// Hold of the leases and claims of this client, which heartbeats renew three times per hold.
    pub hold: Duration,
    /// Repetition ends when this is set, so a process that ends does not wait for an absent server.
    pub give_up: Option<Arc<AtomicBool>>,
}

impl ClientConfig {
    /// Two minutes of repetition, longer than a restart of a server takes, and a hold of one minute.
    #[must_use]
    pub fn new(url: impl Into<String>) -> Self {
        let (patience, hold) = (Duration::from_secs(120), Duration::from_secs(60));
        Self { url: url.into(), token: None, roots: None, patience, hold, give_up: None }
    }
}

impl fmt::Debug for ClientConfig {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ClientConfig")
            .field("url", &self.url)
            .field("token", &self.token.as_ref().map(|_| "..."))
            .field("roots", &self.roots)
            .field("patience", &self.patience)
            .field("hold", &self.hold)
            .finish()
    }
}

/// A buffer in another process. A lease without a hold, and a claimed group, are renewed by heartbeats until they are
/// acknowledged, released, finalized or aborted, or until the client is dropped.
#[derive(Debug)]
pub struct Client {
    core: Arc<ClientCore>,
    renewals: LeaseRenewal,
}

impl Client {
    /// Connects with the first request.
    ///
    /// # Errors
    /// A URL or certificates that cannot be used; a thread that cannot be started.
    pub fn new(config: ClientConfig) -> Result<Self, BufferError> {
        let hold = config.hold;
        let core = Arc::new(ClientCore::new(config)?);
        let renewals = LeaseRenewal::start(Arc::clone(&core), hold)?;
        Ok(Self { core, renewals })
    }

    /// Sends a MessagePack body to a route beside the buffer's ([`super::ServerConfig::routes`]), with the same
    /// repetition. The request must be idempotent.
    ///
    /// # Errors
    /// A server that cannot be reached, refuses, or answers something other than `T`.
    pub fn ask<T: DeserializeOwned>(&self, path: &str, body: &impl Serialize) -> Result<T, BufferError> {
        self.core.ask(&ClientCall::post(path.to_owned(), body)?)
    }

    /// The same in one attempt, within `limit`.
    ///
    /// # Errors
    /// As [`Client::ask`].
    pub fn ask_once<T: DeserializeOwned>(
        &self,
        path: &str,
        body: &impl Serialize,
        limit: Duration,
    ) -> Result<T, BufferError> {
        self.core.ask_once(&ClientCall::post(path.to_owned(), body)?, limit)
    }

    /// Submits one group.
    fn append(&self, view: GroupView<'_>) -> Result<Submitted, BufferError> {
        let call = ClientCall::post("/v1/groups".to_owned(), &SubmissionsView { groups: [view] })?;
        let answer: AppendAnswer = self.core.ask_or_full(&call)?;
        let result = answer.results.into_iter().next();
        let result = result.ok_or_else(|| self.core.bad_answer(&call, "there is no result for the group"))?;
        let answer = match result.status {
            ItemStatus::Accepted => Finalized::Accepted,
            ItemStatus::Duplicate => Finalized::Duplicate,
            ItemStatus::Stale => Finalized::Stale,
            ItemStatus::Full => Finalized::Full,
            ItemStatus::Invalid => return Err(self.invalid(&call, result)),
        };
        Ok(Submitted { answer, group: result.id.map(GroupId) })
    }

    fn invalid(&self, call: &ClientCall, result: ItemResult) -> BufferError {
        let ItemResult { code, detail, found, bound, .. } = result;
        let code = code.map_or("invalid", |code| code.as_str()).to_owned();
        self.core.refused(
            call,
            ClientResponse::OK,
            code,
            detail.unwrap_or_default(),
            Evidence { found, bound },
        )
    }

    /// Converts a lease of the wire.
    fn lease_of(
        &self,
        call: &ClientCall,
        body: LeaseBody,
        hold: Option<Duration>,
    ) -> Result<Lease, BufferError> {
        let most = usize::MAX;
        let any = ItemLimits {
            trajectories: most,
            tokens: most,
            vocabulary: None,
            values: most,
            name_bytes: most,
            depth: most,
            correct: false,
        };
        let groups = body.groups.into_iter().map(|submission| match submission.check(any) {
            Ok((_, group)) => Ok(Arc::new(group)),
            Err(rejection) => Err(self.core.bad_answer(call, rejection.detail)),
        });
        let groups = groups.collect::<Result<Vec<_>, _>>()?;
        let lease = Lease {
            id: LeaseId(body.id),
            consumer: body.consumer,
            step: PolicyVersion(body.step),
            groups,
            hold,
            dropped_stale: body.dropped_stale,
        };
        if hold.is_none() {
            self.renewals.add(&lease);
        }
        Ok(lease)
    }
}

impl Producer for Client {
    /// An admission without a hold has the hold of this client.
    fn admit(&self, request: AdmitRequest, wait: Duration) -> Result<Vec<GroupId>, BufferError> {
        if request.limit == 0 {
            return Ok(Vec::new());
        }
        let deadline = Instant::now() + wait;
        loop {
            let left = deadline.saturating_duration_since(Instant::now());
            let wait_ms = milliseconds(left).min(MAX_WAIT_MS);
            let body = AdmissionsRequest {
                served_version: request.served.0,
                limit: request.limit.min(AdmissionsRequest::MAX_GROUPS),
                wait_ms,
                hold_ms: milliseconds(request.hold.unwrap_or(self.renewals.hold())),
                holder: request.holder,
            };
            let call = ClientCall::post("/v1/admissions".to_owned(), &body)?
                .waiting(wait_ms)
                .repeat(RetryPolicy::IfNotSent);
            let answer: AdmissionsAnswer = self.core.ask(&call)?;
            if !answer.ids.is_empty() || Instant::now() >= deadline {
                return Ok(answer.ids.into_iter().map(GroupId).collect());
            }
        }
    }

    fn claim(&self, group: GroupId, served: PolicyVersion) -> Result<(), BufferError> {
        self.core.ask(&claim(group, served)?).map(done)?;
        self.renewals.add_group(group, served);
        Ok(())
    }

    fn finalize(&self, group: Group) -> Result<Finalized, BufferError> {
        if group.trajectories.is_empty() {
            return Err(BufferError::EmptyGroup { group: group.id });
        }
        let answered = self.append(GroupView::from(&group));
        self.renewals.remove_group(group.id);
        Ok(answered?.answer)
    }

    fn abort(&self, group: GroupId, retry: bool) -> Result<(), BufferError> {
        self.renewals.remove_group(group);
        let call = ClientCall::post(format!("/v1/admissions/{}/abort", group.0), &AbortRequest { retry })?;
        self.core.ask(&call.repeat(RetryPolicy::IfNotSent)).map(done)
    }

    fn abandon(&self, holder: u64) -> Result<usize, BufferError> {
        let call = ClientCall::post("/v1/admissions/abandon".to_owned(), &AbandonRequest { holder })?;
        Ok(self.core.ask::<AbandonedBody>(&call)?.groups)
    }

    fn submit(&self, key: &str, group: Group) -> Result<Submitted, BufferError> {
        if key.is_empty() || key.len() > MAX_KEY {
            return Err(BufferError::Key { length: key.len(), limit: MAX_KEY });
        }
        if group.trajectories.is_empty() {
            return Err(BufferError::EmptyGroup { group: group.id });
        }
        self.append(GroupView { group: &group, key: Some(key) })
    }
}

impl Consumer for Client {
    /// A wait longer than half a minute is split into several requests; a lease limited only by tokens can be short
    /// after the first.
    fn lease(&self, request: &LeaseRequest, wait: Duration) -> Result<Lease, BufferError> {
        let (length, limit) = (request.consumer.len(), LeaseRequest::MAX_CONSUMER);
        if !(1..=limit).contains(&length) {
            return Err(BufferError::Consumer { length, limit });
        }
        let started = Instant::now();
        let deadline = started + wait;
        let repeat = if request.step.is_some() { RetryPolicy::Always } else { RetryPolicy::IfNotSent };
        loop {
            let left = milliseconds(deadline.saturating_duration_since(Instant::now()));
            let wait_ms = left.min(MAX_WAIT_MS);
            let body = LeasesRequest {
                consumer: request.consumer.clone(),
                step: request.step.map(|step| step.0),
                groups: request.groups,
                // Fewer groups are enough only at the end of the whole wait.
                at_least: if left > MAX_WAIT_MS { request.groups } else { request.at_least },
                tokens: request.tokens,
                max_staleness: request.max_staleness,
                wait_ms,
                hold_ms: milliseconds(request.hold.unwrap_or(self.renewals.hold())),
            };
            let call = ClientCall::post("/v1/leases".to_owned(), &body)?.waiting(wait_ms).repeat(repeat);
            let answer: LeaseAnswer = self.core.ask(&call)?;
            if let Some(lease) = answer.lease {
                return self.lease_of(&call, lease, request.hold);
            }
            if Instant::now() < deadline {
                continue;
            }
            let Some(stats) = answer.stats else {
                return Err(self.core.bad_answer(&call, "there is neither a lease nor a reason"));
            };
            let stats = Box::new(Stats::from(stats));
            let step = request.step.unwrap_or(stats.policy_version);
            let (waited, held_for_slow) = (started.elapsed(), answer.held_for_slow);
            return Err(BufferError::LeaseTimeout { step, waited, held_for_slow, stats });
        }
    }

    fn extend(&self, lease: LeaseId, hold: Duration) -> Result<(), BufferError> {
        self.core.ask(&extension(lease, hold)?).map(done)
    }

    fn ack(&self, lease: LeaseId) -> Result<(), BufferError> {
        self.renewals.remove(lease);
        self.core.ask(&ClientCall::post(format!("/v1/leases/{}/ack", lease.0), &EmptyRequest {})?).map(done)
    }

    fn ack_through(&self, consumer: &str, through: PolicyVersion) -> Result<(), BufferError> {
        self.renewals.remove_through(consumer, through);
        let body = AckThroughRequest { consumer: consumer.to_owned(), through: through.0 };
        self.core.ask(&ClientCall::post("/v1/leases/ack".to_owned(), &body)?).map(done)
    }

    fn release(&self, lease: LeaseId) -> Result<(), BufferError> {
        self.renewals.remove(lease);
        self.core
            .ask(&ClientCall::post(format!("/v1/leases/{}/release", lease.0), &EmptyRequest {})?)
            .map(done)
    }

    fn quarantine(&self, group: GroupId) -> Result<Option<String>, BufferError> {
        let call = ClientCall::post(format!("/v1/groups/{}/quarantine", group.0), &EmptyRequest {})?;
        self.core.ask(&call).map(|QuarantinedBody { sender, .. }| sender)
    }

    fn set_version(&self, version: PolicyVersion, rewind: bool) -> Result<(), BufferError> {
        let body = VersionRequest { version: version.0, rewind };
        self.core.ask(&ClientCall::put("/v1/policy/version".to_owned(), &body)?).map(done)
    }

    fn stats(&self) -> Result<Stats, BufferError> {
        self.core.ask(&ClientCall::get("/v1/stats".to_owned())).map(|stats: StatsBody| stats.into())
    }
}

fn done(_: EmptyAnswer) {}

fn claim(group: GroupId, served: PolicyVersion) -> Result<ClientCall, BufferError> {
    ClientCall::post(format!("/v1/admissions/{}/claim", group.0), &ClaimRequest { served_version: served.0 })
}

fn extension(lease: LeaseId, hold: Duration) -> Result<ClientCall, BufferError> {
    ClientCall::post(format!("/v1/leases/{}/extend", lease.0), &ExtendRequest { hold_ms: milliseconds(hold) })
}
