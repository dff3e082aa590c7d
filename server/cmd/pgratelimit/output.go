package main

import (
	"encoding/json"
	"errors"
	"fmt"

	"github.com/jackc/pgx/v5/pgconn"
	"github.com/spf13/cobra"
)

// print prints an answer: with --json the value, and otherwise the text.
func (p *program) print(c *cobra.Command, value any, text string) error {
	if !p.json {
		_, err := fmt.Fprintln(c.OutOrStdout(), text)
		return err
	}
	out := json.NewEncoder(c.OutOrStdout())
	out.SetEscapeHTML(false)
	return out.Encode(value)
}

// described adds what the database had to say beyond the message.
func described(err error) error {
	var pgErr *pgconn.PgError
	if !errors.As(err, &pgErr) {
		return err
	}
	hint := pgErr.Hint
	if pgErr.Code == "42883" { // undefined_function
		hint = "Run pgratelimit install, or put the schema of the functions on search_path."
	}
	return fmt.Errorf("%w. %s %s", err, pgErr.Detail, hint)
}
