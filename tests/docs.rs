//! What the documents say that the code can check.

use gpu_sys::env::TABLE;

#[test]
fn the_readme_lists_every_variable_with_its_default_and_unit() {
    let readme = include_str!("../README.md");
    for variable in TABLE {
        let (name, default, unit, help) =
            (variable.name, variable.default, variable.unit, variable.help);
        let row = format!("| `{name}` | {default} | {unit} | {help} |");
        assert!(readme.contains(&row), "README.md lacks this row:\n{row}");
    }
}
