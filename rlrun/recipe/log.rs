//! Rules of `[log]` and `[dashboard]`.
//!
//! Invariant: an address that other machines can reach has a token.

use super::checks::existing;
use super::ranges::Checker;
use super::schema::RawRecipe;

/// Checks the sections; makes paths absolute.
pub(super) fn check(raw: &mut RawRecipe, checker: &mut Checker<'_>) {
    let dashboard = &mut raw.dashboard;
    if let Some(file) = dashboard.token_file.take() {
        dashboard.token_file = existing(&file, "dashboard.token_file", "write the token into it", checker);
    }
    if let Some(listen) = dashboard.listen.filter(|listen| !listen.ip().is_loopback())
        && dashboard.token_file.is_none()
    {
        let message =
            format!("`dashboard.listen` is {listen}, which other machines can reach without a token");
        let help = "name a `dashboard.token_file`, or listen on 127.0.0.1";
        checker.report("dashboard.listen", message, help);
    }
    if let Some(url) = &raw.log.otlp
        && !["http://", "https://"].iter().any(|scheme| url.starts_with(scheme))
    {
        let message = format!("`log.otlp` is {url:?}, which is no address");
        checker.report("log.otlp", message, "write an address such as \"http://127.0.0.1:4318\"");
    }
    if raw.log.schedule && raw.supervised.is_some() {
        let message =
            "`log.schedule` records what samplers and trainer did, and `[supervised]` samples nothing";
        checker.report("log.schedule", message, "leave it out: training without sampling repeats by itself");
    }
    if raw.log.otlp.is_some() && raw.log.timeline == 0 {
        let message = "`log.otlp` sends the timeline, and `log.timeline` is 0";
        checker.report("log.otlp", message, "set `log.timeline`, or leave `log.otlp` out");
    }
}
