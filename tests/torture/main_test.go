// Package torture tests long runs that try to break the package, and the oracles that judge them.
package torture

import (
	"testing"

	"github.com/pgratelimit/pgratelimit/tests/kit"
	"github.com/pgratelimit/pgratelimit/tests/pgtest"
)

func TestMain(m *testing.M) { pgtest.Main(kit.Tortured{M: m}) }
