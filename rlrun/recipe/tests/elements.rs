//! Single elements of lists, changed by index and by name.

use super::*;

const TWO: &str = "[model.random]\n[data.arithmetic]\n[trainer]\nsteps = 5\n[rollout]\nstop = [\"a\", \"b\"]\n\
                   [[rewards]]\nkind = \"exact\"\n[[rewards]]\nkind = \"regex\"\nname = \"Form\"\npattern = \"x\"\n";

#[test]
fn an_element_is_changed_by_its_index_or_its_name() {
    let case = Case::new(TWO);
    let sets =
        ["rewards[0].weight=0.25", "rewards.form.weight=2", "rewards.form.pattern=y+", "rollout.stop[1]=c"];
    let (recipe, origins) = case.load(&sets, &[]).unwrap();
    let [exact, form] = &recipe.rewards[..] else { panic!("{:?}", recipe.rewards) };
    assert_eq!((exact.weight, form.weight, form.pattern.as_deref()), (0.25, 2.0, Some("y+")));
    assert_eq!(recipe.rollout.stop, ["a", "c"]);
    for path in ["rewards[0].weight", "rewards[1].pattern", "rollout.stop[1]"] {
        assert_eq!(origins.describe(path), "--set", "{path}");
    }
    assert!(origins.describe("rewards[0].kind").ends_with("run.toml:8:1"));
    // By its kind, if it has no name; from the environment, and from a recipe over its base.
    let (recipe, _) = case.load(&[], &[("RLRUN__REWARDS__EXACT__WEIGHT", "3")]).unwrap();
    assert_eq!(recipe.rewards[0].weight, 3.0);
    case.write("over.toml", "extends = \"run.toml\"\n[rewards.Form]\nweight = 4\n");
    let over = case.directory.path().join("over.toml");
    let (recipe, _) = Recipe::load(&over, &[], &Program::default()).unwrap();
    assert_eq!((recipe.rewards[0].weight, recipe.rewards[1].weight), (1.0, 4.0));
}

#[test]
fn an_element_that_is_not_there_is_an_error_at_its_key() {
    for (set, message, help) in [
        ("rewards[2].weight=1", "`rewards` has no element `[2]`", "`rewards[0]` (`rewards.exact`)"),
        ("rewards.maths.weight=1", "`rewards` has no element `maths`", "`rewards[1]` (`rewards.Form`)"),
        ("rewards.weight=1", "`rewards` has no element `weight`", "it has `rewards[0]`"),
        (
            "rollout.stop_token_ids[0]=1",
            "`rollout.stop_token_ids[0]` is an element of a list",
            "write the list",
        ),
        ("rewards[x].weight=1", "`rewards[x]` is not a key", "section.key=value"),
        ("rewards[0].wieght=1", "unknown key `rewards[0].wieght`", "did you mean `rewards[0].weight`?"),
        ("rewards[0]=1", "`rewards[0]`: expected", ""),
        ("rewards={}", "`rewards`: expected a list", ""),
    ] {
        let shown = Case::new(TWO).errors(&[set], &[]);
        assert!(shown.contains(&format!("error: {message}")) && shown.contains(help), "{set}: {shown}");
        assert!(shown.contains(" --> --set:1:"), "{set}: {shown}");
    }
    let twice = format!("{TWO}[[rewards]]\nkind = \"exact\"\n");
    let shown = Case::new(&twice).errors(&["rewards.exact.weight=2"], &[]);
    assert!(shown.starts_with("error: `rewards` has 2 elements `exact`"), "{shown}");
}
