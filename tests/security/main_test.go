// Package security tests what a role may do, what hostile sessions and schema owners can change, and whose code runs.
package security

import (
	"testing"

	"github.com/pgratelimit/pgratelimit/tests/pgtest"
)

func TestMain(m *testing.M) { pgtest.Main(m) }
