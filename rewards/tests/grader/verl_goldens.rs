//! The string graders against verdicts of verl's own functions, made by `tests/data/verl_goldens.py`.

use rewards::RewardSpec;
use serde_json::Value;

use crate::outcome;

#[test]
fn string_graders_score_as_verl_does() {
    let rows: Vec<Value> = include_str!("../data/verl_goldens.jsonl")
        .lines()
        .map(|line| serde_json::from_str(line).unwrap())
        .collect();
    assert!(rows.len() > 1000);
    let strict = RewardSpec { strict_box: Some(true), ..RewardSpec::new("math_dapo") };
    for row in &rows {
        let (gold, text) = (row["gold"].as_str().unwrap(), row["text"].as_str().unwrap());
        for (spec, golden) in
            [(RewardSpec::new("math_dapo"), &row["dapo"]), (strict.clone(), &row["strict_box"])]
        {
            let found = outcome(&spec, gold, text);
            assert_eq!(found.value, golden["score"].as_f64(), "{row}");
            assert_eq!(
                (&found.details["acc"], &found.details["pred"]),
                (&golden["acc"], &golden["pred"]),
                "{row}"
            );
        }
        assert_eq!(
            outcome(&RewardSpec::new("hendrycks"), gold, text).value,
            row["hendrycks"].as_f64(),
            "{row}"
        );
    }
}
