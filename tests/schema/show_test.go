package schema

import (
	"context"
	"errors"
	"regexp"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5/pgconn"
	"github.com/pgratelimit/pgratelimit/tests/kit"
	"github.com/pgratelimit/pgratelimit/tests/pgtest"
	"github.com/stretchr/testify/require"
)

// Each line that an error's context names is the line that make show prints under that number.
func TestShow_NumbersLinesAsErrorsDo(t *testing.T) {
	t.Parallel()
	_, err := pgtest.New(t).Pool.Exec(context.Background(), "select ratelimit_acquire('unknown', 'k')")
	var pgErr *pgconn.PgError
	require.True(t, errors.As(err, &pgErr))
	frames := regexp.MustCompile(`function ([\w.]+)\(.* line (\d+) at (\w+)`).FindAllStringSubmatch(pgErr.Where, -1)
	require.Len(t, frames, 2, pgErr.Where)
	for _, frame := range frames {
		function, line, statement := frame[1], frame[2], strings.ToLower(frame[3])
		shown, err := kit.Command("../..", nil, "make", "--silent", "show", "FUNCTION="+function).CombinedOutput()
		require.NoError(t, err, "%s", shown)
		require.Regexp(t, `(?m)^ *`+line+` +`+statement+` `, string(shown), pgErr.Where)
	}
}
