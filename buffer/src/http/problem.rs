//! Errors as `application/problem+json` (RFC 9457), with stable codes.
//!
//! Invariant: every unsuccessful answer of the server is made here, so [`ProblemCode`] lists all errors, and the
//! OpenAPI document takes its errors from it. Details are for people and may change.

use axum::http::{HeaderName, HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::BufferError;

/// Seconds until a retry of a temporarily refused request.
const RETRY_AFTER: HeaderValue = HeaderValue::from_static("1");

/// Maximum number of characters of a detail, which can quote the client.
const MAX_DETAIL: usize = 2000;

macro_rules! codes {
    ($($name:ident = $status:ident $text:tt $title:literal;)*) => {
        /// What went wrong; stable in meaning and spelling.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize, ToSchema)]
        #[schema(as = Code)]
        pub(crate) enum ProblemCode {
            $(#[doc = $title] #[serde(rename = $text)] $name,)*
        }

        impl ProblemCode {
            /// Its HTTP status.
            pub(crate) fn status(self) -> StatusCode {
                match self { $(Self::$name => StatusCode::$status,)* }
            }

            /// Its name on the wire.
            pub(crate) fn as_str(self) -> &'static str {
                match self { $(Self::$name => $text,)* }
            }

            /// A line of text that does not depend on the request.
            pub(crate) fn title(self) -> &'static str {
                match self { $(Self::$name => $title,)* }
            }
        }
    };
}

codes! {
    // Requests that cannot be understood.
    BadQuery = BAD_REQUEST "bad_query" "the query is not as documented";
    BadPath = BAD_REQUEST "bad_path" "a part of the path is not as documented";
    BadEncoding = BAD_REQUEST "bad_encoding" "the body cannot be decompressed";
    BadHost = BAD_REQUEST "bad_host" "the request names more than one host";
    Incomplete = BAD_REQUEST "incomplete" "the body ended early";
    Unauthorized = UNAUTHORIZED "unauthorized" "a token is needed that this server knows";
    Forbidden = FORBIDDEN "forbidden" "the role of the token does not allow this";
    OwnTrainer = FORBIDDEN "own_trainer" "the run trains on its buffer itself";
    ForeignOrigin = FORBIDDEN "foreign_origin" "a page of another site must not use this server";
    NotFound = NOT_FOUND "not_found" "there is no such route";
    MethodNotAllowed = METHOD_NOT_ALLOWED "method_not_allowed" "the route has no such method";
    NotAcceptable = NOT_ACCEPTABLE "not_acceptable" "answers are JSON or MessagePack";
    BodyTimeout = REQUEST_TIMEOUT "body_timeout" "the body did not arrive in time";
    BodyTooLarge = PAYLOAD_TOO_LARGE "body_too_large" "the body is larger than this server takes";
    DecodedTooLarge = PAYLOAD_TOO_LARGE "decoded_too_large" "the body takes more memory than this server gives";
    UnsupportedMediaType = UNSUPPORTED_MEDIA_TYPE "unsupported_media_type" "bodies are JSON or MessagePack";
    UnsupportedEncoding = UNSUPPORTED_MEDIA_TYPE "unsupported_encoding" "bodies are plain, gzip or zstd";
    WrongHost = MISDIRECTED_REQUEST "wrong_host" "this server does not answer to that name";
    BadBody = UNPROCESSABLE_ENTITY "bad_body" "the body does not have the right shape";
    OutOfRange = UNPROCESSABLE_ENTITY "out_of_range" "a number is outside its range";
    BadConsumer = UNPROCESSABLE_ENTITY "bad_consumer" "the name of the consumer cannot be used";
    // The buffer is in another state than the request needs.
    UnknownGroup = NOT_FOUND "unknown_group" "there is no such group";
    UnknownLease = NOT_FOUND "unknown_lease" "there never was such a lease";
    LeaseLost = CONFLICT "lease_lost" "the lease is over";
    LeaseOver = CONFLICT "lease_over" "the lease ended in another way";
    WrongState = CONFLICT "wrong_state" "the group is in another state";
    StepPassed = CONFLICT "step_passed" "the groups of the step are gone";
    VersionBehind = CONFLICT "version_behind" "the version is older than the one known";
    FutureVersion = UNPROCESSABLE_ENTITY "future_version" "no trainer has made that version yet";
    VersionJump = UNPROCESSABLE_ENTITY "version_jump" "the version would put every group over the bound";
    // Groups that cannot be stored.
    EmptyGroup = UNPROCESSABLE_ENTITY "empty_group" "the group has no trajectories";
    EmptyTrajectory = UNPROCESSABLE_ENTITY "empty_trajectory" "a trajectory has no tokens";
    UnequalLengths = UNPROCESSABLE_ENTITY "unequal_lengths" "the streams of a trajectory differ in length";
    NotFinite = UNPROCESSABLE_ENTITY "not_finite" "a number is infinite or not a number";
    LogprobPositive = UNPROCESSABLE_ENTITY "logprob_positive" "a log-probability is above 0";
    FirstTokenTrained = UNPROCESSABLE_ENTITY "first_token_trained" "nothing precedes the first token";
    TokenOutOfVocabulary = UNPROCESSABLE_ENTITY "token_out_of_vocabulary" "a token id is outside the vocabulary";
    GroupTooLarge = UNPROCESSABLE_ENTITY "group_too_large" "the group has more bytes than can be kept";
    TooManyTrajectories = UNPROCESSABLE_ENTITY "too_many_trajectories" "the group has too many trajectories";
    TooManyTokens = UNPROCESSABLE_ENTITY "too_many_tokens" "a trajectory has too many tokens";
    UnknownId = UNPROCESSABLE_ENTITY "unknown_id" "the id was never admitted";
    NoIdentity = UNPROCESSABLE_ENTITY "no_identity" "the group has neither id nor key";
    TwoIdentities = UNPROCESSABLE_ENTITY "two_identities" "the group has both id and key";
    BadKey = UNPROCESSABLE_ENTITY "bad_key" "the key cannot be used";
    BadKept = UNPROCESSABLE_ENTITY "bad_kept" "the kept tokens do not fit the trained tokens";
    BadExperts = UNPROCESSABLE_ENTITY "bad_experts" "the experts do not fit the tokens or the model";
    BadTemperature = UNPROCESSABLE_ENTITY "bad_temperature" "the temperature cannot have sampled anything";
    BadTurn = UNPROCESSABLE_ENTITY "bad_turn" "the turns do not fit the tokens";
    BadBaseline = UNPROCESSABLE_ENTITY "bad_baseline" "a baseline has tokens that are trained on";
    NoVerdict = UNPROCESSABLE_ENTITY "no_verdict" "a trajectory does not say whether it is correct";
    BadIndex = UNPROCESSABLE_ENTITY "bad_index" "the trajectories are not ordered by index";
    BadVersions = UNPROCESSABLE_ENTITY "bad_versions" "the policy versions of a trajectory are not usable";
    NameTooLong = UNPROCESSABLE_ENTITY "name_too_long" "a name is too long";
    TooManyValues = UNPROCESSABLE_ENTITY "too_many_values" "columns and details have too many values";
    TooDeep = UNPROCESSABLE_ENTITY "too_deep" "columns or details are nested too deeply";
    LogprobTooLow = UNPROCESSABLE_ENTITY "logprob_too_low" "a log-probability is lower than any sampler's";
    RewardOutOfRange = UNPROCESSABLE_ENTITY "reward_out_of_range" "a reward is too large to train on";
    // Temporary refusals.
    Preparing = SERVICE_UNAVAILABLE "preparing" "the run does not know yet what it trains";
    Full = TOO_MANY_REQUESTS "full" "the buffer is full";
    Busy = SERVICE_UNAVAILABLE "busy" "too many large bodies are on their way";
    StorageFailed = SERVICE_UNAVAILABLE "storage_failed" "the journal cannot be read or written";
    Stopping = SERVICE_UNAVAILABLE "stopping" "the server is being stopped";
    DamagedGroup = INTERNAL_SERVER_ERROR "damaged_group" "a stored group is not what was written";
    Internal = INTERNAL_SERVER_ERROR "internal" "the server has failed";
}

/// A problem document (RFC 9457).
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
#[schema(as = Problem)]
pub(crate) struct Problem {
    /// Always `about:blank`: the code says more.
    #[serde(rename = "type", default = "about_blank", skip_deserializing)]
    #[schema(value_type = String)]
    kind: &'static str,
    /// What this code means in general.
    pub(crate) title: String,
    /// The HTTP status.
    pub(crate) status: u16,
    /// What went wrong; stable.
    pub(crate) code: ProblemCode,
    /// The evidence of this request, and the remedy, for people.
    pub(crate) detail: String,
    /// Index of the item of the request that it concerns, from 0.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) index: Option<usize>,
    /// The value in the request: a version, an id, a size.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) found: Option<u64>,
    /// The value that it is compared with: the known version, the next id, the maximum size.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) bound: Option<u64>,
}

/// The numbers of a refusal, for programs.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Evidence {
    /// The value in the request.
    pub(crate) found: Option<u64>,
    /// The value that it is compared with.
    pub(crate) bound: Option<u64>,
}

impl Evidence {
    fn of(error: &BufferError) -> Self {
        let (found, bound) = match error {
            BufferError::FutureVersion { version, known }
            | BufferError::VersionBehind { version, known }
            | BufferError::VersionJump { version, known } => (version.0, Some(known.0)),
            BufferError::StepPassed { step, next } => (step.0, Some(next.0)),
            BufferError::UnknownLease { lease, next } => (lease.0, Some(next.0)),
            BufferError::LeaseLost { lease } | BufferError::LeaseOver { lease, .. } => (lease.0, None),
            BufferError::WrongState { group, .. } => (group.0, None),
            BufferError::UnknownGroup { group, next } => (group.0, Some(next.0)),
            BufferError::GroupTooLarge { bytes, limit } => (*bytes, Some(*limit)),
            _ => return Self::default(),
        };
        Self { found: Some(found), bound }
    }
}

impl Problem {
    /// The media type of problems.
    pub(crate) const MEDIA_TYPE: &'static str = "application/problem+json";

    pub(crate) fn new(code: ProblemCode, detail: impl Into<String>) -> Self {
        let mut detail: String = detail.into();
        if let Some((end, _)) = detail.char_indices().nth(MAX_DETAIL) {
            detail.truncate(end);
        }
        Self {
            kind: about_blank(),
            title: code.title().to_owned(),
            status: code.status().as_u16(),
            code,
            detail,
            index: None,
            found: None,
            bound: None,
        }
    }

    /// Concerns one item of the request.
    pub(crate) fn at(self, index: usize) -> Self {
        Self { index: Some(index), ..self }
    }

    pub(crate) fn evidence(&self) -> Evidence {
        Evidence { found: self.found, bound: self.bound }
    }

    /// Whether a later retry can succeed without any change.
    pub(crate) fn is_for_now(&self) -> bool {
        matches!(self.code.status(), StatusCode::TOO_MANY_REQUESTS | StatusCode::SERVICE_UNAVAILABLE)
    }
}

impl From<&BufferError> for Problem {
    fn from(error: &BufferError) -> Self {
        let code = match error {
            BufferError::EmptyGroup { .. } => ProblemCode::EmptyGroup,
            BufferError::WrongState { .. } => ProblemCode::WrongState,
            BufferError::StepPassed { .. } => ProblemCode::StepPassed,
            BufferError::FutureVersion { .. } => ProblemCode::FutureVersion,
            BufferError::VersionBehind { .. } => ProblemCode::VersionBehind,
            BufferError::VersionJump { .. } => ProblemCode::VersionJump,
            BufferError::LeaseLost { .. } => ProblemCode::LeaseLost,
            BufferError::LeaseOver { .. } => ProblemCode::LeaseOver,
            BufferError::UnknownLease { .. } => ProblemCode::UnknownLease,
            BufferError::UnknownGroup { .. } | BufferError::Gone { .. } => ProblemCode::UnknownGroup,
            BufferError::GroupTooLarge { .. } => ProblemCode::GroupTooLarge,
            BufferError::QueueFull { .. } => ProblemCode::Full,
            BufferError::Consumer { .. } => ProblemCode::BadConsumer,
            BufferError::Key { .. } => ProblemCode::BadKey,
            BufferError::Damaged { .. } => ProblemCode::DamagedGroup,
            BufferError::NotWritable { .. }
            | BufferError::Journal { .. }
            | BufferError::Store { .. }
            | BufferError::StoreSetup { .. }
            | BufferError::StoreInUse { .. }
            | BufferError::Deposed { .. }
            | BufferError::JournalMoved { .. }
            | BufferError::WriterStopped { .. }
            | BufferError::WriteTimeout { .. }
            | BufferError::StillWriting { .. } => ProblemCode::StorageFailed,
            _ => ProblemCode::Internal,
        };
        let Evidence { found, bound } = Evidence::of(error);
        Self { found, bound, ..Self::new(code, error.to_string()) }
    }
}

impl From<BufferError> for Problem {
    fn from(error: BufferError) -> Self {
        Self::from(&error)
    }
}

fn about_blank() -> &'static str {
    "about:blank"
}

impl IntoResponse for Problem {
    fn into_response(self) -> Response {
        with_problem_headers(&self, &self)
    }
}

/// An answer with the status and headers of `problem`, and a body that has at least its fields.
pub(crate) fn with_problem_headers(problem: &Problem, body: &impl Serialize) -> Response {
    // Plain data with string keys always encodes; an empty body would still have its status.
    let body = serde_json::to_vec(body).unwrap_or_default();
    let mut response = (problem.code.status(), body).into_response();
    let headers = response.headers_mut();
    headers.insert(header::CONTENT_TYPE, HeaderValue::from_static(Problem::MEDIA_TYPE));
    if problem.is_for_now() {
        headers.insert(header::RETRY_AFTER, RETRY_AFTER);
    }
    if problem.code == ProblemCode::Unauthorized {
        headers.insert(header::WWW_AUTHENTICATE, HeaderValue::from_static("Bearer"));
    }
    response
}

/// The retry header of a successful answer that asks to retry.
pub(crate) fn retry_after() -> [(HeaderName, HeaderValue); 1] {
    [(header::RETRY_AFTER, RETRY_AFTER)]
}

#[cfg(test)]
mod tests {
    use utoipa::PartialSchema;

    use super::*;

    #[test]
    fn codes_are_described_as_they_are_sent() {
        let schema = serde_json::to_value(ProblemCode::schema()).unwrap();
        let described = schema["enum"].as_array().unwrap();
        assert!(described.len() > 40, "{described:?}");
        for name in described {
            let code: ProblemCode = serde_json::from_value(name.clone()).unwrap();
            assert_eq!(*name, code.as_str());
        }
    }
}
