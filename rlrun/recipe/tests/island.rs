//! The rules of `[island]`.

use super::*;

const ISLAND: &str = "island.url=http://127.0.0.1:8703";

#[test]
fn an_island_resolves_to_an_equal_one_with_the_defaults_of_the_papers() {
    let case = Case::new(MINIMAL);
    let (recipe, origins) =
        case.load(&[ISLAND, "island.name=paris", "island.compression=int4"], &[]).unwrap();
    let resolved = recipe.resolved_toml(&origins);
    let again = Recipe::load(&case.write("resolved.toml", &resolved), &[], &Program::default()).unwrap().0;
    assert_eq!(again, recipe, "{resolved}");
    let island = recipe.island.unwrap();
    assert_eq!((island.steps, island.fragments, island.overlap_steps), (32, 1, 0));
    assert!(Case::new(MINIMAL).load(&[], &[]).unwrap().0.island.is_none());
}

#[test]
fn what_an_island_cannot_be_is_refused_with_a_remedy() {
    for (set, message, help) in [
        ("island.url=ftp://x", "`island.url` is \"ftp://x\", which is no address", "rlrun serve islands"),
        ("island.steps=0", "`island.steps` is 0; it must be 1 or more", ""),
        ("island.fragments=5", "`island.steps`, 32, is no multiple of `island.fragments`, 5", "every `steps"),
        ("island.overlap_steps=32", "`island.overlap_steps` is 32, and there are 32 steps", "lower it"),
        ("island.local_weight=2", "`island.local_weight` is 2; it must be at least 0 and at most 1", ""),
        ("island.compression=int2", "int2", "int8"),
        ("island.name=a/b", "`a/b` is no name of an island", "set `island.name`"),
        (
            "island.token_file=nowhere",
            "`island.token_file`: there is no `nowhere`",
            "write the token into it",
        ),
    ] {
        let shown = Case::new(MINIMAL).errors(&[ISLAND, set], &[]);
        assert!(shown.contains(message) && shown.contains(help), "{set}: {shown}");
    }
    let shown = Case::new(MINIMAL).errors(&["island.url=http://u:secret@127.0.0.1:8703"], &[]);
    assert!(shown.contains("`island.url` has a password") && !shown.contains("u:secret"), "{shown}");
    let case = Case::new(MINIMAL);
    let token = format!("island.token_file={}", case.write("token", "t").display());
    for (url, is_safe) in [
        ("http://10.0.0.1:8703", false),
        ("http://127.0.0.1.example.org", false),
        ("https://10.0.0.1:8703", true),
        ("http://localhost:8703", true),
        ("http://[::1]:8703/", true),
    ] {
        let set = format!("island.url={url}");
        if is_safe {
            assert!(case.load(&[&set, &token], &[]).is_ok(), "{url}");
        } else {
            let shown = case.errors(&[&set, &token], &[]);
            assert!(shown.contains("`island.token_file` would be sent unencrypted"), "{url}: {shown}");
        }
    }
    let ranks = [ISLAND, "trainer.ranks=processes", "trainer.world=2", "placement.processes=true"];
    let shown = Case::new(MINIMAL).errors(&ranks, &[]);
    assert!(shown.contains("`[island]` needs ranks that are threads"), "{shown}");
    let on_device = [ISLAND, "placement.device=emulated"];
    let shown = Case::new(MINIMAL).errors(&on_device, &[]);
    assert!(shown.contains("`[island]` needs weights that are updated in host memory"), "{shown}");
    let on_host = [ISLAND, "placement.device=emulated", "placement.optimizer=host"];
    assert!(Case::new(MINIMAL).load(&on_host, &[]).is_ok());
}
