//! Bounds of what a message loses, and what error feedback makes of it.

use islands::{GradientCompression, IslandError};
use proptest::prelude::*;

const FORMS: [GradientCompression; 3] =
    [GradientCompression::None, GradientCompression::Int8, GradientCompression::Int4];

/// Values of a block and the largest multiple of its scale.
fn block(form: GradientCompression) -> (usize, f32) {
    match form {
        GradientCompression::None => (1, f32::INFINITY),
        GradientCompression::Int8 => (256, 127.0),
        GradientCompression::Int4 => (64, 7.0),
    }
}

proptest! {
    #[test]
    fn a_value_is_at_most_half_a_step_off(
        values in prop::collection::vec(-1e3_f32..1e3, 0..700),
        form in prop::sample::select(&FORMS[..]),
    ) {
        let bytes = form.encode(&values).unwrap();
        prop_assert_eq!(bytes.len(), form.bytes(values.len()));
        let decoded = form.decode(&bytes, values.len()).unwrap();
        let (block, most) = block(form);
        for (values, decoded) in values.chunks(block).zip(decoded.chunks(block)) {
            let largest = values.iter().fold(0.0_f32, |largest, value| largest.max(value.abs()));
            for (value, decoded) in values.iter().zip(decoded) {
                let bound = largest / most / 2.0 * 1.0001;
                prop_assert!((value - decoded).abs() <= bound, "{} {} {}", value, decoded, bound);
            }
        }
    }

    #[test]
    fn messages_and_the_last_residual_sum_to_the_values(
        messages in prop::collection::vec(prop::collection::vec(-1.0_f32..1.0, 130), 1..12),
        form in prop::sample::select(&FORMS[..]),
    ) {
        let mut residual = vec![0.0; 130];
        let (mut sent, mut whole) = (vec![0.0_f64; 130], vec![0.0_f64; 130]);
        for values in &messages {
            let (_, decoded) = form.encode_with(values, &mut residual).unwrap();
            for index in 0..130 {
                sent[index] += f64::from(decoded[index]);
                whole[index] += f64::from(values[index]);
            }
        }
        let (_, most) = block(form);
        for index in 0..130 {
            prop_assert!((sent[index] + f64::from(residual[index]) - whole[index]).abs() < 1e-5);
            // It does not grow with the number of messages.
            prop_assert!(residual[index].abs() <= 2.0 / most);
        }
    }

    #[test]
    fn bytes_of_others_are_decoded_or_refused(
        bytes in prop::collection::vec(any::<u8>(), 0..400),
        count in 0_usize..400,
        form in prop::sample::select(&FORMS[..]),
    ) {
        match form.decode(&bytes, count) {
            Ok(values) => {
                prop_assert_eq!(values.len(), count);
                prop_assert!(values.iter().all(|value| value.is_finite()));
            }
            Err(IslandError::Length { expected, found, .. }) => prop_assert_ne!(expected, found),
            Err(error) => prop_assert!(matches!(error, IslandError::NotFinite { .. }), "{}", error),
        }
    }
}

#[test]
fn values_that_are_not_finite_are_named_and_change_nothing() {
    for form in FORMS {
        let mut residual = vec![0.5, 0.25];
        let error = form.encode_with(&[1.0, f32::NAN], &mut residual).unwrap_err();
        assert!(error.to_string().starts_with("value 1 of an outer gradient is NaN"), "{error}");
        assert_eq!(residual, [0.5, 0.25]);
    }
}
