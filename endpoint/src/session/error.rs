//! Why a request of a session is refused.

/// A request that is refused.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum SessionError {
    /// The key belongs to no session.
    #[error("the API key is that of no session; start one, and use its key")]
    UnknownKey,
    /// A control route was called without the key of the operator.
    #[error("this route needs the admin key, which is in the run's token file")]
    NotAdmin,
    /// The session is over.
    #[error("session {session} has ended; start another one")]
    Ended {
        /// Its id.
        session: String,
    },
    /// Another call of the session is under way.
    #[error("session {session} has a call under way; wait for its answer, or start a session for each agent")]
    Busy {
        /// Its id.
        session: String,
    },
    /// The key of one session was used for another.
    #[error("session {session} belongs to another key")]
    Foreign {
        /// Its id.
        session: String,
    },
    /// There is no such session.
    #[error("there is no session {session}; it ended and was exported, or expired")]
    NoSession {
        /// The id that was asked for.
        session: String,
    },
    /// There is no such interaction.
    #[error("session {session} has no interaction {interaction}; it has {interactions}")]
    NoInteraction {
        /// The session.
        session: String,
        /// The id that was asked for.
        interaction: String,
        /// Number of interactions.
        interactions: usize,
    },
    /// A session with that key is open.
    #[error("the API key is that of an open session; end it, or start with another key")]
    KeyActive,
    /// A key that cannot be one.
    #[error("an API key has 8 to 256 printable characters without blanks")]
    BadKey,
    /// No session can be started.
    #[error("no capacity: {open} sessions are open, at most {limit}; try again later")]
    Full {
        /// Open sessions.
        open: usize,
        /// The limit.
        limit: usize,
    },
    /// The run waits for no episode.
    #[error("no capacity: the run waits for no episode{of_task}; try again later")]
    NoEpisode {
        /// Of which task, if one was named.
        of_task: String,
    },
    /// The session has used up a limit.
    #[error("session {session} has reached {limit} {what}")]
    Limit {
        /// The session.
        session: String,
        /// What is limited.
        what: &'static str,
        /// The limit.
        limit: usize,
    },
    /// A reward that is no finite number.
    #[error("a reward is {value}; it must be a finite number")]
    Reward {
        /// What was given.
        value: f64,
    },
    /// The system gives no random bytes for a key.
    #[error("no key can be made: {0}")]
    NoRandom(String),
}

impl SessionError {
    /// The HTTP status. Clients of OpenAI repeat requests that are answered by 409, 429 and 5xx, and no others.
    #[must_use]
    pub fn status(&self) -> u16 {
        match self {
            Self::UnknownKey => 401,
            Self::NotAdmin | Self::Foreign { .. } => 403,
            Self::NoSession { .. } | Self::NoInteraction { .. } => 404,
            Self::Busy { .. } | Self::KeyActive => 409,
            Self::Ended { .. } => 410,
            Self::Full { .. } | Self::NoEpisode { .. } => 429,
            Self::BadKey | Self::Limit { .. } | Self::Reward { .. } => 400,
            Self::NoRandom(_) => 500,
        }
    }

    /// A stable name for programs.
    #[must_use]
    pub fn code(&self) -> &'static str {
        match self {
            Self::UnknownKey => "invalid_api_key",
            Self::NotAdmin => "not_admin",
            Self::Ended { .. } => "session_ended",
            Self::Busy { .. } => "session_busy",
            Self::Foreign { .. } => "foreign_session",
            Self::NoSession { .. } => "no_session",
            Self::NoInteraction { .. } => "no_interaction",
            Self::KeyActive => "key_active",
            Self::BadKey => "bad_key",
            Self::Full { .. } | Self::NoEpisode { .. } => "no_capacity",
            Self::Limit { .. } => "session_limit",
            Self::Reward { .. } => "bad_reward",
            Self::NoRandom(_) => "no_random",
        }
    }
}
