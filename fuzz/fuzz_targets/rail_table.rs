//! The published table: what is accepted gives no address that wraps.

#![no_main]

use libfuzzer_sys::fuzz_target;
use railset::table::{LayerShape, MAX_TABLE_BYTES, SPILLED, Table};

fuzz_target!(|bytes: &[u8]| {
    let Ok(table) = Table::decode(bytes) else { return };
    assert_eq!(table.encode(), bytes, "a table has one form");
    assert!(bytes.len() <= MAX_TABLE_BYTES);
    let rails = table.rails();
    let backwards: Vec<usize> = (0..rails).rev().collect();
    let turned = table.for_rails(&backwards).expect("its own columns");
    assert_eq!(turned.for_rails(&backwards).as_ref(), Some(&table));
    assert_eq!(table.for_rails(&[rails]), None);
    // The store that this table would fit.
    let shape = |layer: &railset::table::LayerTable| LayerShape {
        layer: layer.layer,
        experts: u32::try_from(layer.slots.len()).expect("bounded"),
        record_bytes: layer.slot_stride,
    };
    let shapes: Vec<LayerShape> = table.layers().iter().map(shape).collect();
    assert!(table.clone().check(&shapes[1..], rails).is_err());
    assert!(table.clone().check(&shapes, rails + 1).is_err());
    let Ok(checked) = table.clone().check(&shapes, rails) else { return };
    assert_eq!(checked.generation(), table.generation());
    for (at, layer) in table.layers().iter().enumerate() {
        for (expert, slot) in (0..).zip(&layer.slots) {
            for (rail, column) in layer.columns.iter().enumerate() {
                let place = checked.place(at, expert, rail);
                if *slot == SPILLED {
                    assert_eq!(place, None);
                    continue;
                }
                let stride = u128::from(layer.slot_stride);
                let address = u128::from(column.base) + u128::from(*slot) * stride;
                let place = place.expect("it is resident");
                assert_eq!((u128::from(place.address), place.rkey), (address, column.rkey));
                assert!(address > 0 && address + stride <= u128::from(u64::MAX));
            }
            assert_eq!(checked.place(at, expert, rails), None);
        }
    }
});
