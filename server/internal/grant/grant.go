// Package grant has the statement that lets a role call functions of the database, for whoever may run it.
package grant

import "strings"

// SomeRole stands for a role whose name is not known.
const SomeRole = "<role>"

// To is the statement for these functions.
func To(role string, functions ...string) string {
	return "grant execute on function " + strings.Join(functions, ", ") + " to " + role + ";"
}
