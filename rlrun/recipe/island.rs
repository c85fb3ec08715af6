//! The rules of `[island]`: its numbers fit each other, and its trainer has weights that can be replaced between two steps.

use std::net::IpAddr;

use buffer::database::has_password;
use islands::terms::{MAX_FRAGMENTS, is_name};

use super::Recipe;
use super::checks::existing;
use super::ranges::{Checker, UNIT};
use super::schema::{IslandSection, RawRecipe};
use super::words::Ranks;

/// Checks the section; makes its paths absolute.
pub(super) fn check(raw: &mut RawRecipe, checker: &mut Checker<'_>) {
    let Some(island) = &mut raw.island else { return };
    if !["http://", "https://"].iter().any(|scheme| island.url.starts_with(scheme)) {
        let message = format!("`island.url` is {:?}, which is no address of a coordinator", island.url);
        let help = "start `rlrun serve islands`, and write its address, such as \"http://127.0.0.1:8703\"";
        checker.report("island.url", message, help);
    }
    check_secrets(island, checker);
    checker.at_least_one("island.steps", usize::try_from(island.steps).unwrap_or(usize::MAX));
    checker.at_least_one("island.fragments", island.fragments);
    checker.number("island.local_weight", island.local_weight, UNIT);
    for (path, key, file) in [
        ("island.token_file", "write the token into it", &mut island.token_file),
        ("island.tls_ca", "name a PEM file with certificates", &mut island.tls_ca),
    ] {
        if let Some(found) = file.take() {
            *file = existing(&found, path, key, checker);
        }
    }
    if island.fragments == 0 || island.steps == 0 {
        return;
    }
    if island.fragments > MAX_FRAGMENTS || !island.steps.is_multiple_of(island.fragments as u64) {
        let message = format!(
            "`island.steps`, {}, is no multiple of `island.fragments`, {}, of at most {MAX_FRAGMENTS}",
            island.steps, island.fragments
        );
        let help = "a fragment is exchanged every `steps / fragments` steps";
        checker.report_latest(&["island.fragments", "island.steps"], message, help);
        return;
    }
    let between = island.steps / island.fragments as u64;
    if island.overlap_steps >= between {
        let message = format!(
            "`island.overlap_steps` is {}, and there are {between} steps from one exchange to the next",
            island.overlap_steps
        );
        let help = "one exchange is under way at a time: lower it";
        checker.report_latest(&["island.overlap_steps", "island.fragments", "island.steps"], message, help);
    }
}

/// The URL is shown, and written into the run directory. A token is sent in every request.
fn check_secrets(island: &IslandSection, checker: &mut Checker<'_>) {
    if has_password(&island.url) {
        let message = "`island.url` has a password, which every file of the run would show";
        let help = "take it out of the URL, and name the file with the token in `island.token_file`";
        // At another line: a message shows the line of its key.
        checker.report("island.token_file", message, help);
    } else if island.token_file.is_some() && island.url.starts_with("http://") && !is_local(&island.url) {
        let message =
            "the token of `island.token_file` would be sent unencrypted to the host of `island.url`";
        let help = "write an address with https://, or one of a tunnel that begins at 127.0.0.1";
        checker.report("island.url", message, help);
    }
}

/// Whether the host of `url` is this machine.
fn is_local(url: &str) -> bool {
    let rest = url.split_once("://").map_or(url, |(_, rest)| rest);
    let authority = rest.split(['/', '?', '#']).next().unwrap_or_default();
    let host = authority.rsplit_once('@').map_or(authority, |(_, host)| host);
    let host = match host.strip_prefix('[') {
        Some(address) => address.split(']').next(),
        None => host.split(':').next(),
    };
    let host = host.unwrap_or_default();
    host == "localhost" || host.parse::<IpAddr>().is_ok_and(|address| address.is_loopback())
}

/// Checks what the rest of a recipe needs for the exchanges.
pub(super) fn check_run(recipe: &Recipe, checker: &mut Checker<'_>) {
    let Some(island) = &recipe.island else { return };
    if let Some(name) = island.name.as_ref().filter(|name| !is_name(name)) {
        let help = "set `island.name` to letters, digits, `.`, `_` and `-`";
        checker.report("island.name", format!("`{name}` is no name of an island"), help);
    }
    for (breaks, path, needs, help) in [
        (recipe.supervised.is_some(), "supervised", "reinforcement learning", "remove `[supervised]`"),
        (
            recipe.trainer.ranks != Ranks::Threads && recipe.trainer.world > 1,
            "trainer.ranks",
            "ranks that are threads",
            "set `trainer.ranks = \"threads\"`",
        ),
        (
            recipe.devices().optimizer_on_device && recipe.lora.is_none(),
            "placement.optimizer",
            "weights that are updated in host memory",
            "set `placement.optimizer = \"host\"`",
        ),
    ] {
        if breaks {
            checker.report_latest(&[path, "island.url"], format!("`[island]` needs {needs}"), help);
        }
    }
}
