// Package spend tests charges, settlements, reservations, partial grants and refunds, and the guards that raise an error in place of a denial.
package spend

import (
	"testing"

	"github.com/pgratelimit/pgratelimit/tests/pgtest"
)

func TestMain(m *testing.M) { pgtest.Main(m) }
