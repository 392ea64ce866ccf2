//! Golden bytes, and tables that are not the store's.

use super::*;

const SHAPES: [LayerShape; 2] = [
    LayerShape { layer: 3, experts: 2, record_bytes: 4096 },
    LayerShape { layer: 5, experts: 1, record_bytes: 8192 },
];

fn layers() -> Vec<LayerTable> {
    let columns = vec![Column { base: 0x1_0000, rkey: 0xa }, Column { base: 0x2_0000, rkey: 0xb }];
    let layer =
        |layer, slots| LayerTable { layer, slot_stride: 8192, columns: columns.clone(), slots };
    vec![layer(3, vec![1, SPILLED]), layer(5, vec![0])]
}

fn table() -> Table {
    Table::new(7, layers()).unwrap()
}

fn refusal(change: impl FnOnce(&mut Vec<LayerTable>)) -> TableError {
    let mut layers = layers();
    change(&mut layers);
    Table::new(7, layers).unwrap().check(&SHAPES, 2).unwrap_err()
}

#[rustfmt::skip]
const GOLDEN: [u8; 124] = [
    7, 0, 0, 0, 0, 0, 0, 0,  2, 0, 0, 0,  2, 0, 0, 0,
    3, 0, 0, 0,  2, 0, 0, 0,  0, 0x20, 0, 0, 0, 0, 0, 0,
    0, 0, 1, 0, 0, 0, 0, 0,  0xa, 0, 0, 0,  0, 0, 0, 0,
    0, 0, 2, 0, 0, 0, 0, 0,  0xb, 0, 0, 0,  0, 0, 0, 0,
    1, 0, 0, 0,  0xff, 0xff, 0xff, 0xff,
    5, 0, 0, 0,  1, 0, 0, 0,  0, 0x20, 0, 0, 0, 0, 0, 0,
    0, 0, 1, 0, 0, 0, 0, 0,  0xa, 0, 0, 0,  0, 0, 0, 0,
    0, 0, 2, 0, 0, 0, 0, 0,  0xb, 0, 0, 0,  0, 0, 0, 0,
    0, 0, 0, 0,
];

#[test]
fn the_table_bytes_are_frozen() {
    assert_eq!(table().encode(), GOLDEN);
    assert_eq!(Table::decode(&GOLDEN), Ok(table()));
}

#[test]
fn the_lengths_that_a_table_may_have_are_frozen() {
    // One layer, one rail, one expert; and 4096 layers of 8 rails with 2^20 experts.
    assert_eq!(MIN_TABLE_BYTES, 16 + 16 + 16 + 4);
    assert_eq!(MAX_TABLE_BYTES, 4_784_144);
}

#[test]
fn every_cut_of_a_table_is_refused() {
    for length in 0..GOLDEN.len() {
        assert!(Table::decode(&GOLDEN[..length]).is_err(), "{length}");
    }
    let longer = [&GOLDEN[..], &[0]].concat();
    let trailing = DecodeError::Trailing { what: "table", found: 1 };
    assert_eq!(Table::decode(&longer), Err(trailing.into()));
}

#[test]
fn a_checked_table_gives_each_rails_address_and_key() {
    let table = table().check(&SHAPES, 2).unwrap();
    assert_eq!(table.place(0, 0, 0), Some(Place { address: 0x1_2000, rkey: 0xa }));
    assert_eq!(table.place(0, 0, 1), Some(Place { address: 0x2_2000, rkey: 0xb }));
    assert_eq!(table.place(1, 0, 1), Some(Place { address: 0x2_0000, rkey: 0xb }));
    for (layer, expert, rail) in [(0, 1, 0), (0, 2, 0), (2, 0, 0), (0, 0, 2)] {
        assert_eq!(table.place(layer, expert, rail), None, "{layer} {expert} {rail}");
    }
    assert!(table.is_resident(0, 0) && !table.is_resident(0, 1));
    assert_eq!((table.resident(), table.generation()), (2, 7));
}

#[test]
fn a_table_of_another_store_is_refused_by_what_differs() {
    let error = refusal(|layers| drop(layers.pop()));
    assert_eq!(error, TableError::Layers { found: 1, expected: 2 });
    let error = refusal(|layers| layers[1].layer = 4);
    assert_eq!(error, TableError::Layer { found: 4, expected: 5 });
    let error = refusal(|layers| layers[0].slots.push(0));
    assert_eq!(error, TableError::Experts { layer: 3, found: 3, expected: 2 });
    let error = refusal(|layers| layers[1].slot_stride = 8191);
    assert_eq!(error, TableError::Stride { layer: 5, found: 8191, record_bytes: 8192 });
    let error = table().check(&SHAPES, 1).unwrap_err();
    assert_eq!(error, TableError::Rails { layer: 3, found: 2, expected: 1 });
}

#[test]
fn a_base_that_cannot_be_is_refused() {
    let error = refusal(|layers| layers[1].columns[1].base = 0);
    assert_eq!(error, TableError::NoBase { layer: 5, rail: 1 });
    let base = u64::MAX - 16_383;
    let wraps = TableError::Wraps { layer: 3, rail: 0, slot: 1, base, stride: 8192 };
    assert_eq!(refusal(|layers| layers[0].columns[0].base = base), wraps);
    let stride = u64::MAX / 2 + 1;
    let error = refusal(|layers| layers[0].slot_stride = stride);
    assert!(matches!(error, TableError::Wraps { slot: 1, .. }), "{error}");
}

#[test]
fn the_last_slot_may_end_at_the_last_address() {
    let mut layers = layers();
    layers[0].columns[0].base = u64::MAX - 16_384;
    let table = Table::new(7, layers).unwrap().check(&SHAPES, 2).unwrap();
    assert_eq!(table.place(0, 0, 0).unwrap().address, u64::MAX - 8192);
}

#[test]
fn a_layer_that_is_wholly_spilled_needs_no_base() {
    let mut layers = layers();
    for layer in &mut layers {
        layer.slots.fill(SPILLED);
        layer.columns.fill(Column { base: 0, rkey: 0 });
    }
    let table = Table::new(7, layers).unwrap().check(&SHAPES, 2).unwrap();
    assert_eq!(table.resident(), 0);
}

#[test]
fn counts_beyond_the_limits_are_refused_before_anything_is_allocated() {
    let with = |at: usize, value: u32| {
        let mut bytes = GOLDEN;
        bytes[at..at + 4].copy_from_slice(&value.to_le_bytes());
        Table::decode(&bytes).unwrap_err().to_string()
    };
    assert!(with(8, u32::MAX).contains("layers is 4294967295, allowed are 1 to 4096"));
    assert!(with(8, 0).contains("layers is 0"));
    assert!(with(12, 9).contains("rails is 9, allowed are 1 to 8"));
    assert!(with(20, 65_537).contains("experts is 65537"));
    assert!(with(20, 65_536).contains("slots: 262144 bytes were due"));
    let layer = |layer| LayerTable {
        layer,
        slot_stride: 1,
        columns: vec![Column { base: 1, rkey: 1 }],
        slots: vec![0; 65_536],
    };
    let error = Table::new(1, (0..17).map(layer).collect()).unwrap_err();
    let most = MAX_ENTRIES;
    assert_eq!(error, TableError::Count { what: "experts", found: 17 * 65_536, most });
    let full = Table::new(1, (0..16).map(layer).collect()).unwrap().encode();
    assert!(full.len() <= MAX_TABLE_BYTES);
    assert!(Table::decode(&full).is_ok());
    // Another layer's header, with as many experts as one may have: refused before its slots are read,
    // which are not there.
    let mut more = full;
    more[8..12].copy_from_slice(&17_u32.to_le_bytes());
    more.extend([16_u32, 65_536, 1, 0, 1, 0, 1, 0].map(u32::to_le_bytes).concat());
    assert_eq!(Table::decode(&more), Err(error));
}

#[test]
fn a_table_is_encoded_into_memory_that_is_asked_for_once() {
    for table in [table(), table().for_rails(&[1]).unwrap()] {
        let bytes = table.encode();
        assert_eq!(bytes.capacity(), bytes.len());
    }
}

#[test]
fn a_client_gets_the_columns_of_its_own_rails() {
    let table = table();
    let turned = table.for_rails(&[1, 0]).unwrap();
    assert_eq!(turned.layers()[0].columns[0], table.layers()[0].columns[1]);
    assert_eq!(table.for_rails(&[1]).unwrap().rails(), 1);
    assert_eq!((table.for_rails(&[2]), table.for_rails(&[])), (None, None));
}
