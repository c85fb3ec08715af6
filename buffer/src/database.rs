//! Names of databases in recipes and on command lines. Invariant: it needs no database, so every program can check them.

/// Longest name of a schema, bytes.
pub(crate) const MAX_SCHEMA: usize = 63;
/// Prefix of the name of a schema that is made of another name.
const SCHEMA_PREFIX: &str = "rlrun_";

/// Whether a URL has a password, which must not be in a recipe or on a command line: both are shown.
#[must_use]
pub fn has_password(url: &str) -> bool {
    let rest = url.split_once("://").map_or(url, |(_, rest)| rest);
    let (address, query) = rest.split_once('?').unwrap_or((rest, ""));
    let authority = address.split('/').next().unwrap_or_default();
    let user = authority.rsplit_once('@').map(|(user, _)| user);
    user.is_some_and(|user| user.contains(':')) || query.split('&').any(|pair| pair.starts_with("password="))
}

/// The name of the schema for a run or a buffer called `name`.
#[must_use]
pub fn schema_name(name: &str) -> String {
    let plain = |c: char| if c.is_ascii_alphanumeric() { c.to_ascii_lowercase() } else { '_' };
    SCHEMA_PREFIX.chars().chain(name.chars().map(plain)).take(MAX_SCHEMA).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_password_in_a_url_is_found() {
        assert!(has_password("postgres://u:secret@h/d"));
        assert!(has_password("postgres://u@h/d?x=1&password=secret"));
        assert!(!has_password("postgres://u@h:5432/d?application_name=a:b"));
        assert!(!has_password("postgres://h:5432,g:5433/d"));
    }

    #[test]
    fn the_schema_of_a_run_has_its_name() {
        assert_eq!(schema_name("GRPO math-3"), "rlrun_grpo_math_3");
        assert_eq!(schema_name(&"x".repeat(99)).len(), MAX_SCHEMA);
    }
}
