// Package schema tests what is installed, and how: each way to install, upgrade and uninstall, the packages, and the rules of the catalogs.
package schema

import (
	"testing"

	"github.com/pgratelimit/pgratelimit/tests/pgtest"
)

func TestMain(m *testing.M) { pgtest.Main(m) }
